# SPDX-License-Identifier: Apache-2.0
"""Whether a process does something, seen from outside its code."""

from __future__ import annotations

import contextlib
import time

import psutil

#: of one core: less is a thread that looks at a clock now and then
_BUSY_PART = 0.1
#: runnable, or waiting for a disk or a page of a file
_AT_WORK = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


class Activity:
    """Of a process, and of its descendants unless `alone`."""

    def __init__(self, pid: int, alone: bool = False) -> None:
        self._alone = alone
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(pid)
        self._cpu_s, self._at_s = 0.0, -1.0

    def is_seen(self, idle_s: float = 0.0) -> bool:
        """Whether it has used a processor since the last question, or wants one or a disk now.
        `idle_s`: seconds of its processor time until now that do not count. False at the first
        question."""
        if self._process is None:
            return False
        try:
            children = [] if self._alone else self._process.children(recursive=True)
            family = [self._process, *children]
            cpu_s, at_s = sum(map(_cpu_s, family)) - idle_s, time.monotonic()
            used_s, passed_s = cpu_s - self._cpu_s, at_s - self._at_s
            is_first, self._cpu_s, self._at_s = self._at_s < 0, cpu_s, at_s
            if is_first:
                return False
            return used_s > _BUSY_PART * passed_s or self._process.status() in _AT_WORK
        except psutil.Error:
            return False


def is_stopped(pid: int | None) -> bool:
    """Whether a process does not run, and has not ended."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _cpu_s(process: psutil.Process) -> float:
    """What it and its children that have ended have used."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
