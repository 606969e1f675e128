# SPDX-License-Identifier: Apache-2.0
"""Threads for every peer of its own, so that one that hangs keeps no other waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

#: of all peers together; further jobs wait for one of them
_MAX_THREADS = 512

#: does not raise; gets the moment from which its peer is waited for (monotonic)
Job = Callable[[float], None]


@dataclass
class _Lane:
    """A peer's jobs that wait, with the moments they came, and how many run."""

    waiting: deque[tuple[Job, float]] = field(default_factory=deque)
    num_running: int = 0
    progress: float = 0.0


class Lanes:
    """Up to `width` jobs of a peer run at a time, in order; those of different peers do not wait
    for one another. There are as many threads as jobs ever ran at once."""

    def __init__(self, name: str, width: int) -> None:
        self._width = width
        self._lock = threading.Lock()
        self._lanes: dict[Hashable, _Lane] = {}
        self._threads = ThreadPoolExecutor(_MAX_THREADS, name)
        self._closed = False

    def submit(self, peer: Hashable, job: Job) -> None:
        """Run `job(since)` soon; never after `close`. `since` is now, or the peer's last progress
        before the job's turn if that is later: to wait for others is no fault of a peer that
        serves them."""
        with self._lock:
            if self._closed:
                return
            lane = self._lanes.setdefault(peer, _Lane())
            lane.waiting.append((job, time.monotonic()))
            if lane.num_running == self._width:
                return
            lane.num_running += 1
            self._threads.submit(self._work, peer, lane)

    def note_progress(self, peer: Hashable) -> None:
        """A peer has done what one of its jobs asked for."""
        with self._lock:
            if (lane := self._lanes.get(peer)) is not None:
                lane.progress = time.monotonic()

    def _work(self, peer: Hashable, lane: _Lane) -> None:
        while True:
            with self._lock:
                if not lane.waiting:
                    lane.num_running -= 1
                    if not lane.num_running:
                        del self._lanes[peer]
                    return
                job, came = lane.waiting.popleft()
                since = max(came, lane.progress)
            job(since)

    def close(self) -> None:
        """Drop what waits; returns when what runs has ended."""
        with self._lock:
            self._closed = True
            for lane in self._lanes.values():
                lane.waiting.clear()
        self._threads.shutdown(wait=True)
