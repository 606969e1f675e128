# SPDX-License-Identifier: Apache-2.0
"""Seals of state in device memory: the digests of `seal`, made by `csrc/cuda/digest.cu`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm._extension import load_cuda_ops
from vllm.distributed.kv_transfer.kv_connector.v1.seal import SHORT, Span

#: bytes that the accumulators take up between two scrambles, and bytes of their sums
_BLOCK_BYTES = 1024
_SUMS_BYTES = 64
#: bytes of a span's place, size and digest on the device
_SPAN_BYTES = 32


def device_seal_bytes(num_bytes: int, smallest: int) -> int:
    """Device memory that a `DeviceSealer` of these arguments allocates."""
    return num_bytes // _BLOCK_BYTES * _SUMS_BYTES + num_bytes // smallest * _SPAN_BYTES


class DeviceSealer:
    """Digests of up to `num_bytes` bytes at a time on `device`, a CUDA device, in spans of at least
    `smallest` bytes that do not overlap.

    All memory is allocated here. Raises ValueError where spans are so short that the formulas of
    long inputs do not hold.
    """

    def __init__(self, device: torch.device, num_bytes: int, smallest: int) -> None:
        if smallest <= SHORT:
            raise ValueError(
                f"digests on the device are of more than {SHORT} bytes, and the smallest block of "
                f"this model has {smallest}: set staging_device to 'cpu'"
            )
        load_cuda_ops()
        self._num_bytes, self._num_spans = num_bytes, num_bytes // smallest
        self._sums = torch.empty(
            num_bytes // _BLOCK_BYTES, _SUMS_BYTES // 8, dtype=torch.int64, device=device
        )
        self._spans = torch.empty(3 * self._num_spans, dtype=torch.int64, device=device)
        self._found = torch.empty(self._num_spans, dtype=torch.int64, device=device)
        self._spans_on_host = torch.empty(3 * self._num_spans, dtype=torch.int64, pin_memory=True)
        self._found_on_host = torch.empty(self._num_spans, dtype=torch.int64, pin_memory=True)
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()

    def digests(self, data: Tensor, spans: Sequence[Span]) -> list[int]:
        """XXH3-64 of each of these parts of a contiguous `uint8 [n]` on the device, which nothing
        writes any more; they come back in one copy, and whoever calls waits for it."""
        count = len(spans)
        starts, sizes = [start for start, _ in spans], [size for _, size in spans]
        if any(start < 0 or size > len(data) - start for start, size in spans):
            raise ValueError(f"{spans} are not all in data of {len(data)} bytes")
        if any(size <= SHORT for size in sizes):
            raise ValueError(f"digests on the device are of more than {SHORT} bytes: {spans}")
        if count > self._num_spans or sum(sizes) > self._num_bytes:
            raise ValueError(f"{count} spans of {sum(sizes)} bytes are more than were planned for")
        if not count:
            return []
        blocks = list(itertools.accumulate((-(-n // _BLOCK_BYTES) - 1 for n in sizes), initial=0))
        with self._lock, torch.cuda.stream(self._stream):
            table = self._spans_on_host[: 3 * count].view(3, count)
            table.copy_(torch.tensor([starts, sizes, blocks[:-1]], dtype=torch.int64))
            on_device = self._spans[: 3 * count].view(3, count)
            on_device.copy_(table, non_blocking=True)
            found = self._found[:count]
            torch.ops.vllm_cuda.xxh3_64(data, on_device, blocks[-1], self._sums, found)
            self._found_on_host[:count].copy_(found, non_blocking=True)
            self._stream.synchronize()
            return [one & (2**64 - 1) for one in self._found_on_host[:count].tolist()]

    def close(self) -> None:
        """As `Sealer.close`: nothing runs between calls."""
