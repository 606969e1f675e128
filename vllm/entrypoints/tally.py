# SPDX-License-Identifier: Apache-2.0
"""How many of something there are in a server: in its one process, or in all of them together."""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Protocol

_NUMBER = struct.Struct("=q")


class Tally(Protocol):
    """A number that one process changes and whose limit holds for the server."""

    @property
    def total(self) -> int:
        """In all processes."""

    def try_enter(self, limit: int) -> bool:
        """Count one more, unless there are `limit` already."""

    def enter(self) -> None:
        """Count one more."""

    def leave(self) -> None:
        """Count one less, of those that this process has counted."""


class OwnTally:
    """The number of a server that is one process."""

    def __init__(self) -> None:
        self.total = 0

    def try_enter(self, limit: int) -> bool:
        """Count one more, unless there are `limit` already."""
        if self.total >= limit:
            return False
        self.total += 1
        return True

    def enter(self) -> None:
        """Count one more."""
        self.total += 1

    def leave(self) -> None:
        """Count one less."""
        self.total -= 1


class Counted(IntEnum):
    """What processes count together."""

    GENERATING = 0
    CONNECTIONS = 1
    LOAD = 2


class TallyFile:
    """Numbers `[processes, kinds]` in a file that processes map; each writes its own row.

    The system drops the lock of a process that dies; whoever replaces it clears its row.
    """

    def __init__(self, path: str, num_processes: int) -> None:
        self._num_processes = num_processes
        size = num_processes * len(Counted) * _NUMBER.size
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self.locked():
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process checks a limit meanwhile; a matter of microseconds."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def get(self, process: int, kind: Counted) -> int:
        """The number of one process."""
        return _NUMBER.unpack_from(self._map, self._offset(process, kind))[0]

    def set(self, process: int, kind: Counted, number: int) -> None:
        """Only for one's own row, or that of a process that is gone."""
        _NUMBER.pack_into(self._map, self._offset(process, kind), number)

    def total(self, kind: Counted) -> int:
        """The number in all processes."""
        return sum(self.get(process, kind) for process in range(self._num_processes))

    def clear(self, process: int) -> None:
        """The process is gone, and what it counted."""
        for kind in Counted:
            self.set(process, kind, 0)

    def close(self) -> None:
        """Unmap; the file stays for the others."""
        self._map.close()
        os.close(self._file)

    @staticmethod
    def _offset(process: int, kind: Counted) -> int:
        return (process * len(Counted) + kind) * _NUMBER.size


class SharedTally:
    """One process's view of a number in a `TallyFile`."""

    def __init__(self, file: TallyFile, process: int, kind: Counted) -> None:
        self._file, self._process, self._kind = file, process, kind
        self._own = 0

    @property
    def total(self) -> int:
        """In all processes."""
        return self._file.total(self._kind)

    def try_enter(self, limit: int) -> bool:
        """Count one more, unless there are `limit` already in all processes."""
        with self._file.locked():
            if self.total >= limit:
                return False
            self.enter()
        return True

    def enter(self) -> None:
        """Count one more."""
        self._own += 1
        self._file.set(self._process, self._kind, self._own)

    def leave(self) -> None:
        """Count one less."""
        self._own -= 1
        self._file.set(self._process, self._kind, self._own)


class Tallies:
    """All numbers of one process: its own alone without a `file`."""

    def __init__(self, file: TallyFile | None = None, process: int = 0) -> None:
        self._file, self._process = file, process
        self._own: dict[Counted, Tally] = {}

    def of(self, kind: Counted) -> Tally:
        """The number of one kind, always the same object."""
        if kind not in self._own:
            self._own[kind] = (
                OwnTally() if self._file is None else SharedTally(self._file, self._process, kind)
            )
        return self._own[kind]


def make_tally_file(directory: Path, num_processes: int) -> str:
    """The path of a new file of zeros."""
    path = str(directory / "tallies")
    TallyFile(path, num_processes).close()
    return path
