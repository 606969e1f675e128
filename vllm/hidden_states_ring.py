# SPDX-License-Identifier: Apache-2.0
"""Captured hidden states in shared memory, for a trainer on the engine's machine.

    with RingReader("/dev/shm/rows") as ring:
        for rows in ring:
            train(rows.token_ids, rows.hidden_states)

The ring is a file, best in a file system in memory: a header, then records one after another, each
a request's rows, whole or not at all. `head` and `tail` count bytes from the beginning of time. Any
number of readers share it: each record goes to one of them. A record is sealed with XXH3-64.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
import xxhash
from torch import Tensor

Policy = Literal["wait", "drop_new", "drop_oldest"]
POLICIES: tuple[Policy, ...] = ("wait", "drop_new", "drop_oldest")

_MAGIC = b"vllmrows"
_HEADER_BYTES = 4096
#: magic, capacity, columns, hidden size, name of the dtype
_SHAPE = struct.Struct("<8sQQQ16s")
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
    """`token_ids [n]` int64 and `hidden_states [n, columns, hidden]` of one request."""

    request_id: str
    token_ids: Tensor
    hidden_states: Tensor


class _Ring:
    """The mapped file; `lock` keeps others from moving the cursors."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.map = mmap.mmap(fd, 0)
        magic, self.capacity, self.columns, self.hidden, dtype = _SHAPE.unpack_from(self.map)
        if magic != _MAGIC:
            raise RingBroken("not a ring of hidden states")
        self.dtype: torch.dtype = vars(torch)[dtype.rstrip(b"\0").decode()]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The system frees it if its holder dies."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def cursors(self) -> tuple[int, int, int, int]:
        head, tail, dropped, closed = _CURSORS.unpack_from(self.map, _CURSORS_AT)
        return head, tail, dropped, closed

    def set_cursor(self, which: int, value: int) -> None:
        struct.pack_into("<Q", self.map, _CURSORS_AT + 8 * which, value)

    def record(self, position: int) -> tuple[int, int, int, int]:
        size, num_rows, id_bytes, sealed = _RECORD.unpack_from(self.map, self.at(position))
        return size, num_rows, id_bytes, sealed

    def at(self, position: int) -> int:
        return _HEADER_BYTES + position % self.capacity

    def is_at(self, path: str) -> bool:
        """Whether `path` still names this ring."""
        try:
            return os.stat(path).st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self.map.close()
        os.close(self._fd)


HEAD, TAIL, DROPPED, CLOSED = range(4)


def _lock_file(path: str) -> str:
    """Locked by the writer as long as it lives."""
    return f"{path}.writer"


def record_bytes(num_rows: int, row_bytes: int, request_id: str) -> int:
    """Room that a request takes in a ring."""
    size = _RECORD.size + len(request_id.encode()) + num_rows * (8 + row_bytes)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RingWriter:
    """Makes a ring of at least `num_bytes` at `path`, in place of an older one.

    OSError if it cannot be made; ValueError while another engine writes there. For one thread.
    """

    def __init__(
        self, path: str, num_bytes: int, columns: int, hidden: int, dtype: torch.dtype
    ) -> None:
        self._path = path
        self._owner = os.open(_lock_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._owner)
            raise ValueError(f"ring_path {path}: another engine writes to this ring") from error
        capacity = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        new = f"{path}.new"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        # All of it now: a full file system is an error here, and a crash later.
        os.posix_fallocate(fd, 0, _HEADER_BYTES + capacity)
        name = str(dtype).removeprefix("torch.").encode()
        os.pwrite(fd, _SHAPE.pack(_MAGIC, capacity, columns, hidden, name), 0)
        self._ring = _Ring(fd)
        os.rename(new, path)
        self._row_shape = (columns, hidden)

    def put(self, rows: Rows, policy: Policy, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Append a record; False if it was dropped: there is no room and `policy` says so, or
        `stopped` while it waits. ValueError unless every token has one row, of the ring's shape."""
        count = len(rows.token_ids)
        if rows.hidden_states.shape != (count, *self._row_shape):
            raise ValueError(
                f"rows of shape {tuple(rows.hidden_states.shape)} for {count} tokens in a ring of "
                f"{self._row_shape}"
            )
        if rows.hidden_states.dtype != self._ring.dtype:
            raise ValueError(f"{rows.hidden_states.dtype} rows in a ring of {self._ring.dtype}")
        row_bytes = self._row_shape[0] * self._row_shape[1] * self._ring.dtype.itemsize
        size = record_bytes(count, row_bytes, rows.request_id)
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
                        _RECORD.pack_into(ring.map, ring.at(head), padding, _PADDING, 0, 0)
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
        view = memoryview(ring.map)
        start = at = ring.at(head) + _RECORD.size
        for data in (name, _bytes_of(rows.token_ids), _bytes_of(rows.hidden_states)):
            view[at : at + len(data)] = data
            at += len(data)
        sealed = xxhash.xxh3_64_intdigest(view[start:at])
        _RECORD.pack_into(ring.map, ring.at(head), size, len(rows.token_ids), len(name), sealed)
        view.release()
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
        self._ring.close()
        os.close(self._owner)


class RingReader:
    """Takes records out of the ring at `path`; waits up to `timeout_s` for the engine to make it.

    TimeoutError without one.
    """

    def __init__(self, path: str, timeout_s: float = 60.0) -> None:
        self._path = path
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._ring = _Ring(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                break
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no engine has made the ring {path}") from None
                time.sleep(0.05)
        self._owner = os.open(_lock_file(path), os.O_RDONLY | os.O_CLOEXEC)

    @property
    def num_dropped(self) -> int:
        """Requests whose rows the engine dropped for want of room."""
        return self._ring.cursors()[DROPPED]

    def get(self, timeout_s: float | None = None) -> Rows | None:
        """The next request's rows; None when the engine has ended and everything was read.

        TimeoutError if none come in time; `RingBroken` if the engine died.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        polls = 0
        while True:
            if (rows := self._take()) is not None:
                return rows
            head, tail, _, closed = self._ring.cursors()
            if closed and head == tail:
                return None
            if polls % 200 == 199 and self._is_orphaned():
                raise RingBroken("the engine that wrote this ring has died")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"no rows within {timeout_s} s")
            polls += 1
            time.sleep(_POLL_S)

    def _take(self) -> Rows | None:
        ring = self._ring
        with ring.lock():
            head, tail, _, _ = ring.cursors()
            while tail < head:
                size, num_rows, id_bytes, sealed = ring.record(tail)
                ring_at = ring.at(tail)
                tail += size
                if num_rows != _PADDING:
                    row_bytes = ring.columns * ring.hidden * ring.dtype.itemsize
                    length = id_bytes + num_rows * (8 + row_bytes)
                    start = ring_at + _RECORD.size
                    data = bytearray(ring.map[start : start + length])
                    ring.set_cursor(TAIL, tail)
                    return self._decode(data, id_bytes, num_rows, sealed)
                ring.set_cursor(TAIL, tail)
        return None

    def _decode(self, data: bytearray, id_bytes: int, num_rows: int, sealed: int) -> Rows:
        if (found := xxhash.xxh3_64_intdigest(data)) != sealed:
            raise RingBroken(f"a record was sealed with {sealed:016x}, arrived with {found:016x}")
        ring, name = self._ring, data[:id_bytes].decode()
        tokens = torch.frombuffer(data[id_bytes : id_bytes + 8 * num_rows], dtype=torch.int64)
        rows = torch.frombuffer(data[id_bytes + 8 * num_rows :], dtype=ring.dtype)
        return Rows(name, tokens, rows.view(num_rows, ring.columns, ring.hidden))

    def _is_orphaned(self) -> bool:
        """Whether nobody holds the writer's lock, or another ring has taken the place of this one,
        though its writer has not said goodbye."""
        try:
            fcntl.flock(self._owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self._owner, fcntl.LOCK_UN)
        except BlockingIOError:
            if self._ring.is_at(self._path):
                return False
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
