# SPDX-License-Identifier: Apache-2.0
"""Host memory that state passes through, registered with the transport once."""

from __future__ import annotations

import threading

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import Deadline, PeerLost

_ALIGNMENT = 256


class Staging:
    """`num_bytes` of host memory, given out in segments, first fit. Page-locked with `pinned`."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._changed = threading.Condition()
        #: start -> end of free ranges, in order, no two of them adjacent
        self._free = [(0, num_bytes)]
        self._sizes: dict[int, int] = {}
        self._closed = False

    def allocate(self, num_bytes: int, deadline: Deadline) -> int:
        """Offset of a segment; waits for room. `PeerLost` at the deadline, or when closed."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        what = f"{num_bytes} bytes of staging memory ({len(self.buffer)} in all)"
        with self._changed:
            while not self._closed:
                for i, (start, end) in enumerate(self._free):
                    if end - start >= size:
                        self._free[i : i + 1] = [(start + size, end)] if start + size < end else []
                        self._sizes[start] = size
                        return start
                self._changed.wait(deadline.left(what))
        raise PeerLost("the engine is shutting down")

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
            self._changed.notify_all()

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return sum(self._sizes.values())

    def fits(self, num_bytes: int) -> bool:
        """Whether a segment of this size can ever be given out."""
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT <= len(self.buffer)

    def close(self) -> None:
        """Whoever waits for room is told that there will be none."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
