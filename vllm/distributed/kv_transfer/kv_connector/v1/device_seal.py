# SPDX-License-Identifier: Apache-2.0
"""Seals of state in device memory: the digests of `seal`, made by `csrc/cuda/digest.cu`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate

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
    `smallest` bytes that do not overlap; of `num_spans` at a time, by default as many as there can
    be in so many bytes.

    All memory is allocated here. Raises ValueError where spans are so short that the formulas of
    long inputs do not hold.
    """

    def __init__(
        self, device: torch.device, num_bytes: int, smallest: int, num_spans: int | None = None
    ) -> None:
        if smallest <= SHORT:
            raise ValueError(
                f"digests on the device are of more than {SHORT} bytes, and the smallest block of "
                f"this model has {smallest}: set staging_device to 'cpu'"
            )
        load_cuda_ops()
        self._num_bytes = num_bytes
        self._num_spans = num_bytes // smallest if num_spans is None else num_spans
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
        return self.digests_in_parts(data, [spans], _is_there)

    def digests_in_parts(
        self,
        data: Tensor,
        parts: Sequence[Sequence[Span]],
        bring: Callable[[int], torch.cuda.Event | None],
        timed: Callable[[float], None] | None = None,
    ) -> list[int]:
        """As `digests`, of the spans of all parts in order; each part is of `num_bytes` at most.

        `bring(i)` launches what writes part `i` and returns the event after it. It is called for
        one part after another: digests of one are made while the next one comes. `timed` is told
        the seconds that the device made digests.
        """
        for spans in parts:
            self._check_part(data, spans)
        count = sum(map(len, parts))
        if count > self._num_spans:
            raise ValueError(f"{count} spans are more than were planned for")
        if not count:
            return []
        with self._lock, torch.cuda.stream(self._stream):
            spent: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
            try:
                arrived = bring(0)
                tables = self._upload(parts)  # copies run in turn: it waits for what is on its way
                begin = 0
                for i, (table, num_blocks) in enumerate(tables):
                    following = bring(i + 1) if i + 1 < len(parts) else None
                    if arrived is not None:
                        self._stream.wait_event(arrived)
                    arrived = following
                    found = self._found[begin : begin + table.shape[1]]
                    spent.append((self._mark(), self._mark()))
                    spent[-1][0].record()
                    torch.ops.vllm_cuda.xxh3_64(data, table, num_blocks, self._sums, found)
                    spent[-1][1].record()
                    begin += len(found)
                self._found_on_host[:count].copy_(self._found[:count], non_blocking=True)
            finally:  # also where a part did not come: the next call writes the same tables
                self._stream.synchronize()
            if timed is not None:
                timed(sum(first.elapsed_time(last) for first, last in spent) / 1e3)
            return [one & (2**64 - 1) for one in self._found_on_host[:count].tolist()]

    @staticmethod
    def _mark() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _check_part(self, data: Tensor, spans: Sequence[Span]) -> None:
        sizes = [size for _, size in spans]
        if any(start < 0 or size > len(data) - start for start, size in spans):
            raise ValueError(f"{spans} are not all in data of {len(data)} bytes")
        if any(size <= SHORT for size in sizes):
            raise ValueError(f"digests on the device are of more than {SHORT} bytes: {spans}")
        if sum(sizes) > self._num_bytes:
            raise ValueError(
                f"{len(spans)} spans of {sum(sizes)} bytes are more than were planned for"
            )

    def _upload(self, parts: Sequence[Sequence[Span]]) -> list[tuple[Tensor, int]]:
        """`int64 [3, spans]` on the device of each part: starts, sizes and first blocks; and how
        many blocks it has."""
        tables, begin, words = [], 0, []
        for spans in parts:
            sizes = [size for _, size in spans]
            blocks = list(accumulate((-(-n // _BLOCK_BYTES) - 1 for n in sizes), initial=0))
            words += [start for start, _ in spans]
            words += sizes
            words += blocks[:-1]
            tables.append((self._spans[begin : len(words)].view(3, len(spans)), blocks[-1]))
            begin = len(words)
        self._spans_on_host[:begin].copy_(torch.tensor(words, dtype=torch.int64))
        self._spans[:begin].copy_(self._spans_on_host[:begin], non_blocking=True)
        return tables

    def close(self) -> None:
        """As `Sealer.close`: nothing runs between calls."""


def _is_there(part: int) -> None:
    """Nothing brings what the device has."""
