# SPDX-License-Identifier: Apache-2.0
"""Threads that write finished rows to disk."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class WriterPool:
    """At most `2 * num_threads` jobs exist at a time: each holds a request's rows in host memory.

    Callers ask `has_room` first and keep their work where it is (in the cache) when there is none.
    """

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_writer_threads {num_threads} is below 1")
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="hidden-states")
        self._capacity = 2 * num_threads
        self._in_flight = 0
        self._lock = threading.Lock()

    @property
    def has_room(self) -> bool:
        return self._in_flight < self._capacity

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on a writer thread; it must not raise."""
        with self._lock:
            self._in_flight += 1
        self._executor.submit(job).add_done_callback(self._done)

    def _done(self, _: Future[None]) -> None:
        with self._lock:
            self._in_flight -= 1

    def drain(self) -> None:
        """Wait for every job and end the threads."""
        self._executor.shutdown(wait=True)
