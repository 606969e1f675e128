# SPDX-License-Identifier: Apache-2.0
"""Whether a process does something, seen from outside its code."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

#: of one core: less is a thread that looks at a clock now and then
_BUSY_PART = 0.1
#: of files per second: less are notes about oneself
_BUSY_BYTES = 100_000
#: as `/proc` says it: runnable, and waiting for a disk or a page of a file
_RUNNABLE, _DISK = "R", "D"


class Scope(enum.Enum):
    """What counts: a process and its descendants, it alone, or one thread of it alone."""

    FAMILY = enum.auto()
    PROCESS = enum.auto()
    THREAD = enum.auto()


class Activity:
    """`thread`: the only one of the process that is active for being runnable, where others look at
    a clock now and then; None: each is. It has the system's identifier, not Python's."""

    def __init__(self, pid: int, scope: Scope = Scope.FAMILY, thread: int | None = None) -> None:
        self._scope, self._thread = scope, thread
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(pid)
        self._cpu_s, self._bytes, self._at_s = 0.0, 0, -1.0

    def is_seen(self, idle_s: float = 0.0) -> bool:
        """Whether it wants a processor or a disk now, or has used one since the last question.
        `idle_s`: seconds of its processor time until now that do not count."""
        if self._process is None:
            return False
        try:
            cpu_s, num_bytes = self._used(self._process)
        except psutil.Error:
            return False
        cpu_s, at_s = cpu_s - idle_s, time.monotonic()
        passed_s = at_s - self._at_s if self._at_s >= 0 else float("inf")
        is_used = (
            cpu_s - self._cpu_s > _BUSY_PART * passed_s
            or num_bytes - self._bytes > _BUSY_BYTES * passed_s
        )
        self._cpu_s, self._bytes, self._at_s = cpu_s, num_bytes, at_s
        return is_used or self._wants(self._process)

    def _used(self, process: psutil.Process) -> tuple[float, int]:
        """Seconds of processors, and bytes of files."""
        if self._scope is Scope.THREAD:
            own = [one for one in process.threads() if one.id == self._thread]
            return sum(one.user_time + one.system_time for one in own), 0
        family = [process]
        if self._scope is Scope.FAMILY:
            family += process.children(recursive=True)
        return sum(map(_cpu_s, family)), sum(map(_file_bytes, family))

    def _wants(self, process: psutil.Process) -> bool:
        if not psutil.LINUX:
            return bool(process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP))
        for thread, state in _states(process.pid):
            is_own = thread == self._thread
            if state == _RUNNABLE and (is_own or self._thread is None):
                return True
            if state == _DISK and (is_own or self._scope is not Scope.THREAD):
                return True
        return False


def is_stopped(pid: int | None) -> bool:
    """Whether a process does not run, and has not ended."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _states(pid: int) -> Iterator[tuple[int, str]]:
    """The identifier and the state of each thread."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # The name before it is in brackets, and may contain any.
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()[0]


def _cpu_s(process: psutil.Process) -> float:
    """What it and its children that have ended have used."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _file_bytes(process: psutil.Process) -> int:
    """Read from disks and written to them; 0 where that cannot be seen."""
    if psutil.LINUX:
        with contextlib.suppress(psutil.Error):
            counts = process.io_counters()
            return int(counts.read_bytes + counts.write_bytes)
    return 0
