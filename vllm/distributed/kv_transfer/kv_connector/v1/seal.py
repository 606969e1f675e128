# SPDX-License-Identifier: Apache-2.0
"""Seals of transferred state: a digest made as bytes leave, checked as they arrive.

The digest is XXH3-64, which finds damage, not forgery. Bytes that do not have it are never decoded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash
from torch import Tensor


class SealBroken(ValueError):
    """Data is not what was sealed; the message has both digests."""


def digest(data: Tensor | np.ndarray) -> int:
    """XXH3-64 of the bytes of a contiguous CPU tensor or array; other threads run meanwhile."""
    if isinstance(data, Tensor):
        data = data.view(-1).view(torch.uint8).numpy()
    state = xxhash.xxh3_64()
    state.update(data.data)  # the library's one-call function keeps Python's lock
    return state.intdigest()


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
    """Threads that make digests side by side: one reads a few gigabytes per second."""

    def __init__(self, name: str) -> None:
        self.num_threads = max(2, min(8, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(self.num_threads, name)

    def digests(self, parts: Sequence[Tensor | np.ndarray]) -> list[int]:
        """`digest` of each."""
        shares = balanced([part.nbytes for part in parts], self.num_threads)
        found = self._threads.map(lambda share: [digest(parts[i]) for i in share], shares)
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
