# SPDX-License-Identifier: Apache-2.0
"""Captured hidden states in shared memory, for a trainer on the engine's machine.

    with RingReader("/dev/shm/rows") as ring:
        for rows in ring:
            train(rows.token_ids, rows.hidden_states)

The ring is a file (`hidden_states_ring_file`) of records, each a request's rows, whole or not at
all. Any number of readers share it: each record goes to one of them.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from weakref import WeakSet

from vllm.hidden_states_record import (
    POLICIES,
    Policy,
    Rows,
    check,
    damage,
    data_bytes,
    decode,
    parts,
    write_sealed,
)
from vllm.hidden_states_ring_file import (
    CLOSED,
    DROPPED,
    HEAD,
    PADDING,
    TAIL,
    RingBroken,
    RingFile,
    record_bytes,
)
from vllm.hidden_states_storage import RowFormat

__all__ = ["POLICIES", "Policy", "RingBroken", "RingReader", "RingWriter", "Rows"]

_POLL_S = 0.0005


def _lock_file(path: str) -> str:
    """Locked by the writer as long as it lives."""
    return f"{path}.writer"


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
            raise ValueError(
                f"ring_path {path}: another engine writes to this ring, or another replica of this "
                "one: start a server for each, or use StreamHiddenStatesConnector"
            ) from error
        try:
            self._ring = RingFile.make(path, num_bytes, row_format)
        except BaseException:
            os.close(self._owner)
            raise
        _writers.add(self)

    def put(self, rows: Rows, policy: Policy, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Append a record; False if it was dropped: there is no room and `policy` says so, or
        `stopped` while it waits. ValueError unless every token has one row of the ring's format."""
        count = len(rows.token_ids)
        row_format = self._ring.format
        check(rows, row_format, "ring")
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
                        ring.set_record(head, padding, PADDING, 0, 0)
                        ring.set_cursor(HEAD, head + padding)
                        if tail == head:
                            ring.set_cursor(TAIL, head + padding)
                    return True
                if policy == "drop_oldest":
                    lost, num_rows, _, _ = ring.record(tail)
                    ring.set_cursor(TAIL, tail + lost)
                    ring.set_cursor(DROPPED, dropped + (num_rows != PADDING))
                    continue
            if policy == "drop_new" or stopped():
                return False
            time.sleep(_POLL_S)

    def _append(self, rows: Rows, size: int) -> None:
        ring = self._ring
        head = ring.cursors()[HEAD]
        data = parts(rows)
        sealed = write_sealed(data, ring.data_at(head), ring.write)
        ring.set_record(head, size, len(rows.token_ids), len(data[0]), sealed)
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
            if head == tail and self._ring.is_at(self._path):
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
        self._ring = RingFile(fd)
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
            if tail < head and ring.record(tail)[1] == PADDING:
                tail += ring.record(tail)[0]
                ring.set_cursor(TAIL, tail)
            if tail == head:
                return None, bool(closed)
            size, num_rows, id_bytes, sealed = ring.record(tail)
            length = data_bytes(num_rows, ring.format.row_bytes, id_bytes)
            data = ring.read(ring.data_at(tail), length)
            ring.set_cursor(TAIL, tail + size)
        return self._decode(data, id_bytes, num_rows, sealed), False

    def _decode(self, data: bytearray, id_bytes: int, num_rows: int, sealed: int) -> Rows:
        if problem := damage(data, sealed):
            raise RingBroken(problem)
        return decode(data, id_bytes, num_rows, self._ring.format, self._raw)

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
