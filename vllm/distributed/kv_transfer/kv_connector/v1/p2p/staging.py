# SPDX-License-Identifier: Apache-2.0
"""Memory that state passes through, on the host or on the device; registered with the transport
once."""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.device_seal import DeviceSealer, device_seal_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.seal import Sealer

HOST = torch.device("cpu")

_ALIGNMENT = 256
#: blocks are larger; for what is planned before they are known
_USUAL_BLOCK_BYTES = 1024


class NoRoom(RuntimeError):
    """This engine's own staging memory has no room for a request's state; no peer is to blame."""


def staging_device_bytes(num_bytes: int) -> int:
    """Device memory that a `Staging` of `num_bytes` on a device takes up with its sealer."""
    return num_bytes + device_seal_bytes(num_bytes, _USUAL_BLOCK_BYTES)


class Staging:
    """`num_bytes` on `device`, given out in segments, first fit; whoever waits for room gets it in
    turn. Host memory is page-locked with `pinned`. `smallest`: bytes of the smallest block that
    passes through."""

    def __init__(
        self,
        num_bytes: int,
        pinned: bool = False,
        device: torch.device = HOST,
        smallest: int = _USUAL_BLOCK_BYTES,
    ) -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._smallest = smallest
        self._changed = threading.Condition()
        #: start -> end of free ranges, in order, no two of them adjacent
        self._free = [(0, num_bytes)]
        self._sizes: dict[int, int] = {}
        self._queue: deque[object] = deque()
        self._freed_at = 0.0
        self._closed = False

    def make_sealer(self, name: str) -> Sealer | DeviceSealer:
        """What makes digests of segments where they are."""
        if self.buffer.is_cuda:
            return DeviceSealer(self.buffer.device, len(self.buffer), self._smallest)
        return Sealer(name)

    def allocate(self, num_bytes: int, patience_s: float) -> int:
        """Offset of a segment; waits for room. `NoRoom` when there never can be, when no other
        segment was given back for `patience_s`, or when closed."""
        size = staged_bytes(num_bytes)
        what = f"{num_bytes} bytes of staging memory ({len(self.buffer)} in all)"
        if size > len(self.buffer):
            raise NoRoom(f"{what}: raise staging_bytes")
        turn, came = object(), time.monotonic()
        with self._changed:
            self._queue.append(turn)
            try:
                while not self._closed:
                    if self._queue[0] is turn and (start := self._take(size)) is not None:
                        return start
                    left = max(came, self._freed_at) + patience_s - time.monotonic()
                    if left <= 0:
                        raise NoRoom(f"{what}: none was given back for {patience_s:g} s")
                    self._changed.wait(left)
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()
        raise NoRoom(f"{what}: the engine is shutting down")

    def _take(self, size: int) -> int | None:
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[i : i + 1] = [(start + size, end)] if start + size < end else []
                self._sizes[start] = size
                return start
        return None

    def free(self, offset: int) -> None:
        """Give a segment back."""
        with self._changed:
            ranges = sorted([*self._free, (offset, offset + self._sizes.pop(offset))])
            merged = [ranges[0]]
            for start, end in ranges[1:]:
                if start == merged[-1][1]:
                    merged[-1] = (merged[-1][0], end)
                else:
                    merged.append((start, end))
            self._free = merged
            self._freed_at = time.monotonic()
            self._changed.notify_all()

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return sum(self._sizes.values())

    def close(self) -> None:
        """Whoever waits for room is told that there will be none."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def staged_bytes(num_bytes: int) -> int:
    """What a segment of `num_bytes` takes up."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
