# SPDX-License-Identifier: Apache-2.0
"""Seals of transferred state: a digest made as bytes leave, checked as they arrive.

The digest is XXH3-64, which finds damage, not forgery. Bytes that do not have it are never decoded.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash
from torch import Tensor

from vllm._extension import cpu_ops

#: the longest input with formulas of its own, which the compiled ops do not have
SHORT = 240

#: first byte, bytes
Span = tuple[int, int]


class SealBroken(ValueError):
    """Data is not what was sealed; the message has both digests."""


def num_threads() -> int:
    """How many threads make digests beside the steps: one reads some gigabytes per second, a copy
    to or from a device needs tens."""
    return max(2, min(12, (os.cpu_count() or 1) * 3 // 4))


def digests(data: Tensor, spans: Sequence[Span]) -> list[int]:
    """XXH3-64 of each of these parts of a contiguous `uint8 [n]` on the CPU; other threads run
    meanwhile."""
    if any(size <= SHORT for _, size in spans):
        parts = (data[start : start + size] for start, size in spans)
        return [xxhash.xxh3_64_intdigest(part.numpy().data) for part in parts]
    if not spans:
        return []
    starts, sizes = torch.tensor(spans, dtype=torch.int64).t().contiguous()
    found = torch.empty_like(sizes)
    cpu_ops().xxh3_64(data, starts, sizes, found)
    return [one & (2**64 - 1) for one in found.tolist()]


def digest(data: Tensor | np.ndarray) -> int:
    """XXH3-64 of the bytes of a contiguous CPU tensor or array."""
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
    flat = data.view(-1).view(torch.uint8)
    return digests(flat, [(0, flat.numel())])[0]


def balanced(sizes: Sequence[int], count: int) -> list[range]:
    """Parts of neighbouring items: each sums to at most a `count`-th of all, or is one item."""
    share = max(1, -(-sum(sizes) // count))
    parts, first, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and filled + size > share:
            parts.append(range(first, index))
            first, filled = index, 0
        filled += size
    if first < len(sizes):
        parts.append(range(first, len(sizes)))
    return parts


class Sealer:
    """Threads that make digests side by side."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads(), name)

    def digests(self, data: Tensor, spans: Sequence[Span]) -> list[int]:
        """As the function of that name."""
        shares = balanced([size for _, size in spans], num_threads())
        found = self._threads.map(lambda share: digests(data, [spans[i] for i in share]), shares)
        return [one for share in found for one in share]

    def close(self) -> None:
        """Finish what was begun."""
        self._threads.shutdown(wait=True)


def check(data: Tensor | np.ndarray, sealed: int, what: str) -> None:
    """Raise `SealBroken` unless `data` has the digest it was sealed with."""
    compare_digests(digest(data), sealed, what)


def compare_digests(found: int, sealed: int, what: str) -> None:
    """Raise `SealBroken` unless both digests are the same."""
    if found != sealed:
        raise SealBroken(f"{what}: sealed with digest {sealed:016x}, arrived with {found:016x}")
