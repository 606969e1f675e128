# SPDX-License-Identifier: Apache-2.0
"""The worker side: rows leave the cache for host memory, and a thread hands them on."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import CopyEvent, RowCopier
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import (
    PendingSave,
    RowSave,
)
from vllm.hidden_states_storage import StoredRows


class RowSaver(ABC):
    """At most `2 * num_threads` jobs exist at a time: each holds a request's rows in host memory.

    A subclass asks `_has_room` first and keeps its work where it is (in the cache) when there is
    none. Used from the worker's step thread; jobs run on others.
    """

    def __init__(self, copier: RowCopier, num_threads: int) -> None:
        self._copier = copier
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="hidden-states")
        self._capacity = 2 * num_threads
        self._in_flight = 0
        self._lock = threading.Lock()
        self._copying: dict[str, CopyEvent] = {}

    @abstractmethod
    def step(self, saves: Any, finished_req_ids: set[str]) -> set[str]:
        """Take the step's saves; returns the requests whose blocks are not needed any more."""

    def shutdown(self) -> None:
        """Wait for every job and end the threads."""
        self._executor.shutdown(wait=True)

    @property
    def _has_room(self) -> bool:
        return self._in_flight < self._capacity

    def _start(
        self, save: RowSave | PendingSave, job: Callable[[StoredRows, CopyEvent], None]
    ) -> None:
        """Copy a request's rows, and run `job` with them on a thread; it must not raise."""
        rows, event = self._copier.copy(save.block_ids, len(save.token_ids))
        self._copying[save.req_id] = event
        with self._lock:
            self._in_flight += 1
        self._executor.submit(job, rows, event).add_done_callback(self._done)

    def _done(self, _: Future[None]) -> None:
        with self._lock:
            self._in_flight -= 1

    def _take_copied(self) -> set[str]:
        """Requests whose rows have left the cache since the last call."""
        copied = {req_id for req_id, event in self._copying.items() if event.query()}
        for req_id in copied:
            del self._copying[req_id]
        return copied
