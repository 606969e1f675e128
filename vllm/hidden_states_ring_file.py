# SPDX-License-Identifier: Apache-2.0
"""The file of a ring of captured hidden states, best in a file system in memory.

It is a header, then records one after another, each sealed with XXH3-64. `head` and `tail` count
bytes from the beginning of time.

The file is read and written, not mapped: a process that maps a file is killed (SIGBUS) when it
touches what another one has cut off, or what a full file system has no room for. Here it is an
error, and there is one copy to and from the file either way.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

import torch

from vllm.hidden_states_record import RowsBroken, data_bytes
from vllm.hidden_states_storage import STORAGE_DTYPES, RowFormat, StorageDtype
from vllm.utils.own_process import OwnProcess

_MAGIC = b"vllmrows"
_HEADER_BYTES = 4096
#: magic, capacity, columns, hidden size, name of the model's dtype, storage format
_SHAPE = struct.Struct("<8sQQQ16s16s")
#: head, tail, dropped records, 1 when the writer has ended in order
_CURSORS = struct.Struct("<QQQQ")
_CURSORS_AT = 1024
#: bytes of the record with its header, rows (or PADDING), bytes of the request id, digest
_RECORD = struct.Struct("<QQQQ")
#: instead of a number of rows: nothing up to the end of the ring
PADDING = 2**64 - 1
_ALIGNMENT = 64
#: cursors, by their place
HEAD, TAIL, DROPPED, CLOSED = range(4)


class RingBroken(RowsBroken):
    """The engine died, or the ring does not hold what was written."""


def record_bytes(num_rows: int, row_bytes: int, request_id: str) -> int:
    """Room that a request takes in a ring."""
    return _record_bytes(num_rows, row_bytes, len(request_id.encode()))


def _record_bytes(num_rows: int, row_bytes: int, id_bytes: int) -> int:
    return _aligned(_RECORD.size + data_bytes(num_rows, row_bytes, id_bytes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class RingFile:
    """The open file, which it closes; `lock` keeps others from moving the cursors."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._process = OwnProcess()
        try:
            magic, self.capacity, columns, hidden, *names = _SHAPE.unpack(self.read(0, _SHAPE.size))
            if magic != _MAGIC:
                raise RingBroken("not a ring of hidden states")
            dtype, storage = (name.rstrip(b"\0").decode() for name in names)
            if storage not in STORAGE_DTYPES:
                raise RingBroken(f"rows stored as {storage!r}, which is not known to this version")
        except BaseException:
            os.close(fd)
            raise
        self.format = RowFormat(columns, hidden, vars(torch)[dtype], cast("StorageDtype", storage))

    @classmethod
    def make(cls, path: str, num_bytes: int, row_format: RowFormat) -> RingFile:
        """A ring of at least `num_bytes` at `path`, in place of an older one; OSError."""
        capacity = _aligned(num_bytes)
        new = f"{path}.new"
        with suppress(FileNotFoundError):  # what an engine left that was killed here
            os.unlink(new)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # All of it now: a full file system is an error here, and would drop rows later.
            os.posix_fallocate(fd, 0, _HEADER_BYTES + capacity)
            names = (str(row_format.dtype).removeprefix("torch."), row_format.storage)
            shape = (capacity, row_format.columns, row_format.hidden)
            os.pwrite(fd, _SHAPE.pack(_MAGIC, *shape, *(name.encode() for name in names)), 0)
            os.rename(new, path)
        except OSError as error:
            os.close(fd)
            os.unlink(new)
            reason = f"{error.strerror}: no ring of {capacity} bytes can be made"
            raise OSError(error.errno, reason, path) from error
        return cls(fd)

    def read(self, at: int, num_bytes: int) -> bytearray:
        """`RingBroken` if the file ends before."""
        data = bytearray(num_bytes)
        left = memoryview(data)
        while left:
            if not (count := os.preadv(self._fd, [left], at)):
                raise RingBroken(f"the ring's file has been cut short, to {at} bytes or less")
            left, at = left[count:], at + count
        return data

    def write(self, at: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._fd, data, at)
            data, at = data[count:], at + count

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The system frees it if its holder dies. A forked child has one of its own."""
        if not self._process.is_own:
            self._reopen()
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _reopen(self) -> None:
        """Who shares an open file shares its locks."""
        own = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        os.dup2(own, self._fd, inheritable=False)
        os.close(own)
        self._process = OwnProcess()

    def cursors(self) -> tuple[int, int, int, int]:
        """Under the lock, unless who asks is the only one to move what it asks for."""
        head, tail, dropped, closed = _CURSORS.unpack(self.read(_CURSORS_AT, _CURSORS.size))
        return head, tail, dropped, closed

    def set_cursor(self, which: int, value: int) -> None:
        self.write(_CURSORS_AT + 8 * which, memoryview(value.to_bytes(8, "little")))

    def record(self, position: int) -> tuple[int, int, int, int]:
        """`RingBroken` for one that cannot lie there."""
        size, num_rows, id_bytes, sealed = _RECORD.unpack(
            self.read(self.at(position), _RECORD.size)
        )
        expected = room = self.capacity - position % self.capacity
        if num_rows != PADDING:
            expected = _record_bytes(num_rows, self.format.row_bytes, id_bytes)
        if not size == expected <= room:
            raise RingBroken(f"a record of {size} bytes has {num_rows} rows")
        return size, num_rows, id_bytes, sealed

    def set_record(self, position: int, *fields: int) -> None:
        self.write(self.at(position), memoryview(_RECORD.pack(*fields)))

    def at(self, position: int) -> int:
        return _HEADER_BYTES + position % self.capacity

    def data_at(self, position: int) -> int:
        """Of a record, where the bytes behind its header begin."""
        return self.at(position) + _RECORD.size

    def is_at(self, path: str) -> bool:
        """Whether `path` still names this ring."""
        try:
            return os.stat(path).st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return False

    def close(self) -> None:
        os.close(self._fd)
