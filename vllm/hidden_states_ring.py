# SPDX-License-Identifier: Apache-2.0
"""Captured hidden states in shared memory, for a trainer on the engine's machine.

    with RingReader("/dev/shm/rows") as ring:
        for rows in ring:
            train(rows.token_ids, rows.hidden_states)

The ring is a file, best in a file system in memory: a header, then records one after another, each
a request's rows, whole or not at all. `head` and `tail` count bytes from the beginning of time. Any
number of readers share it: each record goes to one of them. A record is sealed with XXH3-64.

The file is read and written, not mapped: a process that maps a file is killed (SIGBUS) when it
touches what another one has cut off, or what a full file system has no room for. Here it is an
error, and there is one copy to and from the file either way.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, cast
from weakref import WeakSet

import torch
import xxhash
from torch import Tensor

from vllm.hidden_states_storage import STORAGE_DTYPES, RowFormat, StorageDtype, StoredRows

Policy = Literal["wait", "drop_new", "drop_oldest"]
POLICIES: tuple[Policy, ...] = ("wait", "drop_new", "drop_oldest")

_MAGIC = b"vllmrows"
_HEADER_BYTES = 4096
#: magic, capacity, columns, hidden size, name of the model's dtype, storage format
_SHAPE = struct.Struct("<8sQQQ16s16s")
#: head, tail, dropped records, 1 when the writer has ended in order
_CURSORS = struct.Struct("<QQQQ")
_CURSORS_AT = 1024
#: bytes of the record with its header, rows (or _PADDING), bytes of the request id, digest
_RECORD = struct.Struct("<QQQQ")
#: instead of a number of rows: nothing up to the end of the ring
_PADDING = 2**64 - 1
_ALIGNMENT = 64
_POLL_S = 0.0005


class RingBroken(RuntimeError):
    """The engine died, or the ring does not hold what was written."""


@dataclass(frozen=True)
class Rows:
    """`token_ids [n]` int64 and `hidden_states [n, columns, hidden]` of one request.

    With `scales`, fp32 `[n, columns, 1]`, the hidden states are as they are stored: float8_e4m3fn.
    """

    request_id: str
    token_ids: Tensor
    hidden_states: Tensor
    scales: Tensor | None = None


class _Ring:
    """The open file, which it closes; `lock` keeps others from moving the cursors."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
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
        """The system frees it if its holder dies."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

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
        if num_rows != _PADDING:
            expected = _record_bytes(num_rows, self.format.row_bytes, id_bytes)
        if not size == expected <= room:
            raise RingBroken(f"a record of {size} bytes has {num_rows} rows")
        return size, num_rows, id_bytes, sealed

    def set_record(self, position: int, *fields: int) -> None:
        self.write(self.at(position), memoryview(_RECORD.pack(*fields)))

    def at(self, position: int) -> int:
        return _HEADER_BYTES + position % self.capacity

    def is_at(self, path: str) -> bool:
        """Whether `path` still names this ring."""
        try:
            return os.stat(path).st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return False

    def close(self) -> None:
        os.close(self._fd)


HEAD, TAIL, DROPPED, CLOSED = range(4)


def _lock_file(path: str) -> str:
    """Locked by the writer as long as it lives."""
    return f"{path}.writer"


def record_bytes(num_rows: int, row_bytes: int, request_id: str) -> int:
    """Room that a request takes in a ring."""
    return _record_bytes(num_rows, row_bytes, len(request_id.encode()))


def _record_bytes(num_rows: int, row_bytes: int, id_bytes: int) -> int:
    return _aligned(_RECORD.size + id_bytes + num_rows * (8 + row_bytes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class RingWriter:
    """Makes a ring of at least `num_bytes` at `path`, in place of an older one.

    OSError if it cannot be made; ValueError while another engine writes there. For one thread.
    """

    def __init__(self, path: str, num_bytes: int, row_format: RowFormat) -> None:
        self._path = path
        self._owner = os.open(_lock_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._owner)
            raise ValueError(f"ring_path {path}: another engine writes to this ring") from error
        try:
            self._ring = self._make(num_bytes, row_format)
        except BaseException:
            os.close(self._owner)
            raise
        _writers.add(self)

    def _make(self, num_bytes: int, row_format: RowFormat) -> _Ring:
        capacity = _aligned(num_bytes)
        new = f"{self._path}.new"
        with suppress(FileNotFoundError):  # what an engine left that was killed here
            os.unlink(new)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # All of it now: a full file system is an error here, and would drop rows later.
            os.posix_fallocate(fd, 0, _HEADER_BYTES + capacity)
            names = (str(row_format.dtype).removeprefix("torch."), row_format.storage)
            shape = (capacity, row_format.columns, row_format.hidden)
            os.pwrite(fd, _SHAPE.pack(_MAGIC, *shape, *(name.encode() for name in names)), 0)
            os.rename(new, self._path)
        except OSError as error:
            os.close(fd)
            os.unlink(new)
            reason = f"{error.strerror}: no ring of {capacity} bytes can be made"
            raise OSError(error.errno, reason, self._path) from error
        return _Ring(fd)

    def put(self, rows: Rows, policy: Policy, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Append a record; False if it was dropped: there is no room and `policy` says so, or
        `stopped` while it waits. ValueError unless every token has one row of the ring's format."""
        count = len(rows.token_ids)
        row_format = self._ring.format
        if problem := row_format.problem(StoredRows(rows.hidden_states, rows.scales), count):
            raise ValueError(f"not rows of this ring: {problem}")
        size = record_bytes(count, row_format.row_bytes, rows.request_id)
        if size > self._ring.capacity:
            raise ValueError(f"{size} bytes of rows in a ring of {self._ring.capacity}")
        if not self._make_room(size, policy, stopped):
            self._ring.set_cursor(DROPPED, self._ring.cursors()[DROPPED] + 1)
            return False
        self._append(rows, size)
        return True

    def _make_room(self, size: int, policy: Policy, stopped: Callable[[], bool]) -> bool:
        """Wait for, or make, room for a record that does not wrap around; pads the end."""
        ring = self._ring
        while True:
            with ring.lock():
                head, tail, dropped, _ = ring.cursors()
                padding = ring.capacity - head % ring.capacity
                needed = size if size <= padding else size + padding
                if tail == head:  # empty: nothing needs to be kept
                    needed = size if size <= padding else padding
                if head + needed - tail <= ring.capacity:
                    if size > padding:
                        ring.set_record(head, padding, _PADDING, 0, 0)
                        ring.set_cursor(HEAD, head + padding)
                        if tail == head:
                            ring.set_cursor(TAIL, head + padding)
                    return True
                if policy == "drop_oldest":
                    lost, num_rows, _, _ = ring.record(tail)
                    ring.set_cursor(TAIL, tail + lost)
                    ring.set_cursor(DROPPED, dropped + (num_rows != _PADDING))
                    continue
            if policy == "drop_new" or stopped():
                return False
            time.sleep(_POLL_S)

    def _append(self, rows: Rows, size: int) -> None:
        ring = self._ring
        head = ring.cursors()[HEAD]
        name = rows.request_id.encode()
        stored = StoredRows(rows.hidden_states, rows.scales)
        tensors = (rows.token_ids, *stored.tensors.values())
        at, sealed = ring.at(head) + _RECORD.size, xxhash.xxh3_64()
        for data in (memoryview(name), *map(_bytes_of, tensors)):
            ring.write(at, data)
            sealed.update(data)
            at += len(data)
        ring.set_record(head, size, len(rows.token_ids), len(name), sealed.intdigest())
        with ring.lock():
            ring.set_cursor(HEAD, head + size)  # from here on it can be read

    @property
    def num_dropped(self) -> int:
        return self._ring.cursors()[DROPPED]

    def close(self) -> None:
        """Readers get what is left, and then the end. A ring that holds nothing goes."""
        with self._ring.lock():
            self._ring.set_cursor(CLOSED, 1)
            head, tail, _, _ = self._ring.cursors()
            if head == tail:
                os.unlink(self._path)
        _writers.discard(self)
        self.close_files()

    def close_files(self) -> None:
        """What the system does when the writer's process dies."""
        self._ring.close()
        os.close(self._owner)


#: those of this process
_writers: WeakSet[RingWriter] = WeakSet()


def _close_copies() -> None:
    """In a forked child: while it has copies of their files, writers that are gone seem alive."""
    for writer in _writers:
        writer.close_files()
    _writers.clear()


os.register_at_fork(after_in_child=_close_copies)


class RingReader:
    """Takes records out of the ring at `path`; waits up to `timeout_s` for the engine to make it.

    Rows that are stored in eight bits come back in the model's dtype; with `raw` as they are, with
    their scales. TimeoutError without a ring.
    """

    def __init__(self, path: str, timeout_s: float = 60.0, raw: bool = False) -> None:
        self._path = path
        self._raw = raw
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                break
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no engine has made the ring {path}") from None
                time.sleep(0.05)
        self._ring = _Ring(fd)
        self._owner = os.open(_lock_file(path), os.O_RDONLY | os.O_CLOEXEC)

    @property
    def num_dropped(self) -> int:
        """Requests whose rows the engine dropped for want of room."""
        with self._ring.lock():
            return self._ring.cursors()[DROPPED]

    def get(self, timeout_s: float | None = None) -> Rows | None:
        """The next request's rows; None when the engine has ended and everything was read.

        TimeoutError if none come in time; `RingBroken` if the engine died.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        polls = 0
        while True:
            rows, ended = self._take()
            if rows is not None or ended:
                return rows
            if polls % 200 == 199 and self._is_orphaned():
                raise RingBroken("the engine that wrote this ring has died")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"no rows within {timeout_s} s")
            polls += 1
            time.sleep(_POLL_S)

    def _take(self) -> tuple[Rows | None, bool]:
        """The next rows if there are any, and whether there will be none any more."""
        ring = self._ring
        with ring.lock():
            head, tail, _, closed = ring.cursors()
            if tail < head and ring.record(tail)[1] == _PADDING:
                tail += ring.record(tail)[0]
                ring.set_cursor(TAIL, tail)
            if tail == head:
                return None, bool(closed)
            size, num_rows, id_bytes, sealed = ring.record(tail)
            length = id_bytes + num_rows * (8 + ring.format.row_bytes)
            data = ring.read(ring.at(tail) + _RECORD.size, length)
            ring.set_cursor(TAIL, tail + size)
        return self._decode(data, id_bytes, num_rows, sealed), False

    def _decode(self, data: bytearray, id_bytes: int, num_rows: int, sealed: int) -> Rows:
        if (found := xxhash.xxh3_64_intdigest(data)) != sealed:
            raise RingBroken(f"a record was sealed with {sealed:016x}, arrived with {found:016x}")
        row_format = self._ring.format
        tokens = torch.empty(num_rows, dtype=torch.int64)
        stored = row_format.empty(num_rows)
        at = id_bytes
        for tensor in (tokens, *stored.tensors.values()):
            end = at + tensor.numel() * tensor.itemsize
            _bytes_of(tensor)[:] = memoryview(data)[at:end]
            at = end
        name = data[:id_bytes].decode()
        if self._raw:
            return Rows(name, tokens, stored.hidden_states, stored.scales)
        return Rows(name, tokens, row_format.restore(stored))

    def _is_orphaned(self) -> bool:
        """Whether nobody holds the writer's lock, or another ring has taken the place of this one,
        though its writer has not said goodbye."""
        try:
            fcntl.flock(self._owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self._owner, fcntl.LOCK_UN)
        except BlockingIOError:
            if self._ring.is_at(self._path):
                return False
        with self._ring.lock():
            head, tail, _, closed = self._ring.cursors()
        return head == tail and not closed

    def __iter__(self) -> Iterator[Rows]:
        while (rows := self.get()) is not None:
            yield rows

    def close(self) -> None:
        self._ring.close()
        os.close(self._owner)

    def __enter__(self) -> RingReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
