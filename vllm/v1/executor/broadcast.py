# SPDX-License-Identifier: Apache-2.0
"""Messages from one process to several of the same host, each written once.

The bytes lie in a ring of slots in shared memory that has no name, so that nothing is left behind
however the processes end. Each receiver has a pipe, through which it is woken by one byte per slot;
its end tells a receiver that the sender is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np

_SLOT_BYTES = 64 * 2**10
#: a pipe holds far more bytes than there are slots, so waking a receiver never blocks
_NUM_SLOTS = 64
_FULL_POLL_S = 0.0001


@dataclass
class _Ring:
    """`taken [receivers]`: slots each receiver has read so far. `sizes [slots]`: bytes of the piece
    in a slot, negative unless it ends its message. `data [slots, bytes]`. Passed to child
    processes as the `raw` arrays, of which the numpy arrays are views."""

    raw: tuple[Any, Any, Any]

    @classmethod
    def allocate(cls, context: BaseContext, num_receivers: int) -> _Ring:
        return cls(
            (
                context.RawArray(ctypes.c_int64, num_receivers),
                context.RawArray(ctypes.c_int64, _NUM_SLOTS),
                context.RawArray(ctypes.c_uint8, _NUM_SLOTS * _SLOT_BYTES),
            )
        )

    def views(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        taken, sizes, data = self.raw
        return (
            np.frombuffer(taken, dtype=np.int64),
            np.frombuffer(sizes, dtype=np.int64),
            np.frombuffer(data, dtype=np.uint8).reshape(_NUM_SLOTS, _SLOT_BYTES),
        )


class Receiver:
    """One end of a broadcast; travels to its process as an argument of it, before its first use."""

    def __init__(self, ring: _Ring, index: int, wake: Connection) -> None:
        self.wake = wake
        self._ring = ring
        self._index = index
        self._views: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def receive(self) -> bytes:
        """Wait for the next message; EOFError when the sender is gone."""
        if self._views is None:
            self._views = self._ring.views()
        taken, sizes, data = self._views
        pieces: list[bytes] = []
        while True:
            if not os.read(self.wake.fileno(), 1):
                raise EOFError("the sender of a broadcast is gone")
            slot = int(taken[self._index]) % _NUM_SLOTS
            size = int(sizes[slot])
            pieces.append(data[slot, : abs(size)].tobytes())
            taken[self._index] += 1
            if size >= 0:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self.wake.close()


class Sender:
    """The other end; used from one thread at a time."""

    def __init__(self, context: BaseContext, num_receivers: int) -> None:
        ring = _Ring.allocate(context, num_receivers)
        self._taken, self._sizes, self._data = ring.views()
        self._num_written = 0
        pipes = [context.Pipe(duplex=False) for _ in range(num_receivers)]
        self._wakes = [ours for _, ours in pipes]
        self.receivers = [Receiver(ring, i, theirs) for i, (theirs, _) in enumerate(pipes)]

    @property
    def connections(self) -> list[Connection]:
        """Both ends of every pipe."""
        return [*self._wakes, *(receiver.wake for receiver in self.receivers)]

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        """Give `message` to every receiver. While one has not read its oldest slot and the ring is
        full, waits and calls `check`, which raises when waiting is of no use any more. A receiver
        that is gone gets nothing, and the ring fills up."""
        view = memoryview(message)
        for start in range(0, len(view), _SLOT_BYTES):
            piece = view[start : start + _SLOT_BYTES]
            while self._num_written - int(self._taken.min()) == _NUM_SLOTS:
                check()
                time.sleep(_FULL_POLL_S)
            slot = self._num_written % _NUM_SLOTS
            self._data[slot, : len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            is_last = start + _SLOT_BYTES >= len(view)
            self._sizes[slot] = len(piece) if is_last else -len(piece)
            self._num_written += 1
            for wake in self._wakes:
                with contextlib.suppress(BrokenPipeError):
                    os.write(wake.fileno(), b"\0")

    def slowest_receivers(self) -> list[int]:
        """Those that have read less than others; empty where all have read equally much."""
        taken = self._taken.tolist()
        return [i for i, count in enumerate(taken) if count < max(taken)]

    def close(self) -> None:
        """Receivers get EOFError once they have read everything."""
        for wake in self._wakes:
            wake.close()
