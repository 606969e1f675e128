# SPDX-License-Identifier: Apache-2.0
"""Ends a process whose parent is gone."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time

from vllm.logger import init_logger

logger = init_logger(__name__)

_POLL_S = 0.5


class ParentWatch(threading.Thread):
    """Sends SIGTERM to this process when its parent dies, and ends it by force if it still runs
    `grace_s` seconds later. Holds no lock while the parent lives, so that this process may fork.

    `leftovers`: directories of the parent, which is to remove them unless it is killed; then this
    process does."""

    def __init__(self, parent_pid: int, grace_s: float) -> None:
        super().__init__(name="parent-watch", daemon=True)
        self._parent_pid = parent_pid
        self._grace_s = grace_s
        self.leftovers: list[str] = []

    @property
    def is_gone(self) -> bool:
        """Whether the parent is."""
        return os.getppid() != self._parent_pid

    def run(self) -> None:
        while not self.is_gone:
            time.sleep(_POLL_S)
        logger.error("the parent process is gone; stopping")
        for directory in self.leftovers:
            shutil.rmtree(directory, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._grace_s)
        os._exit(1)


def watch_parent(grace_s: float) -> ParentWatch:
    """Start it in a process that `multiprocessing` has started."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    watch = ParentWatch(parent.pid, grace_s)
    watch.start()
    return watch
