# SPDX-License-Identifier: Apache-2.0
"""How many of something there are in a server: in its one process, or in all of them together."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

_NUMBER_BYTES = 8


class Counted(IntEnum):
    """What processes count together."""

    GENERATING = 0
    CONNECTIONS = 1
    LOAD = 2


class Tallies:
    """Numbers `[num_processes, kinds]`, of which a process changes its own row, `process`. `path`:
    a file that all of them map; without it this process counts alone.

    The system drops the lock of a process that dies; whoever replaces it clears its row.
    """

    def __init__(self, path: str | None = None, num_processes: int = 1, process: int = 0) -> None:
        self.path, self.process, self._num_processes = path, process, num_processes
        size = num_processes * len(Counted) * _NUMBER_BYTES
        self._file = -1
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with self.locked():
                if os.fstat(self._file).st_size < size:
                    os.ftruncate(self._file, size)
        memory = memoryview(mmap.mmap(self._file, size))
        self.numbers = memory.cast("q", (num_processes, len(Counted)))

    def of(self, kind: Counted) -> "Tally":
        """The number of one kind."""
        return Tally(self, kind)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process checks a limit meanwhile; a matter of microseconds."""
        if self.path is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def total(self, kind: Counted) -> int:
        """The number in all processes."""
        return sum(self.numbers[process, kind] for process in range(self._num_processes))

    def clear(self, process: int) -> None:
        """The process is gone, and what it counted."""
        for kind in Counted:
            self.numbers[process, kind] = 0


class Tally:
    """A number that one process changes and whose limit holds for the server."""

    def __init__(self, tallies: Tallies, kind: Counted) -> None:
        self._tallies, self._kind = tallies, kind

    @property
    def total(self) -> int:
        """In all processes."""
        return self._tallies.total(self._kind)

    def try_enter(self, limit: int) -> bool:
        """Count one more, unless there are `limit` already."""
        with self._tallies.locked():
            if self.total >= limit:
                return False
            self.enter()
        return True

    def enter(self) -> None:
        """Count one more."""
        self._tallies.numbers[self._tallies.process, self._kind] += 1

    def leave(self) -> None:
        """Count one less, of those that this process has counted."""
        self._tallies.numbers[self._tallies.process, self._kind] -= 1
