# SPDX-License-Identifier: Apache-2.0
"""Records of rows in host memory, for trainers that connect: the engine's side.

A record is leased to one reader at a time. It is gone when the reader says that it has it; a reader
whose lease or connection ends first has not, and the next one gets it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging import (
    NoRoom,
    Staging,
    staged_bytes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import Transport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import (
    Address,
    Message,
    MessageServer,
    send,
)
from vllm.hidden_states_record import Policy, Rows, check, data_bytes, parts, write_sealed
from vllm.hidden_states_storage import RowFormat
from vllm.logger import init_logger

logger = init_logger(__name__)

#: raised whenever the messages or what they mean change
VERSION = 1
#: between two looks at leases and at whether to stop
_POLL_S = 0.05
#: a reader that asks for the next record is answered after so many seconds at most
MAX_WAIT_S = 5.0


def stream_bytes(num_rows: int, row_bytes: int, request_id: str) -> int:
    """Room that a request takes in the memory of a stream."""
    return staged_bytes(data_bytes(num_rows, row_bytes, len(request_id.encode())))


@dataclass
class _Record:
    """Where a record lies, and who has it until when (monotonic)."""

    number: int
    offset: int
    size: int
    num_rows: int
    id_bytes: int
    sealed: int
    reader: socket.socket | None = None
    until: float = 0.0

    @property
    def message(self) -> Message:
        names = ("number", "offset", "size", "num_rows", "id_bytes", "sealed")
        return {name: getattr(self, name) for name in names}


class RowStream:
    """`num_bytes` of memory that `transport` lets readers read, who ask at `address` (port 0: any
    free one). `about`: what readers are told of the rows. OSError if it cannot listen there."""

    def __init__(
        self,
        address: Address,
        num_bytes: int,
        row_format: RowFormat,
        lease_s: float,
        transport: Transport,
        about: dict[str, Any],
    ) -> None:
        self._format, self._lease_s = row_format, lease_s
        self._staging = Staging(num_bytes)
        self._memory = memoryview(self._staging.buffer.numpy().data)
        self._transport = transport
        transport.register(self._staging.buffer, None)
        self._hello = {"version": VERSION, "lease_s": lease_s, **about}
        self._changed = threading.Condition()
        self._records: dict[int, _Record] = {}
        self._num_put = 0
        self._num_dropped = 0
        #: connections of readers that were not told of the end
        self._readers: set[socket.socket] = set()
        self._ended = False
        self._progress_at = time.monotonic()
        handlers = {"hello": self._greet, "next": self._answer_next, "done": self._answer_done}
        try:
            self._server = MessageServer(
                *address, {**handlers, **transport.handlers()}, self._forget_reader
            )
        except OSError:
            transport.close()
            raise
        self.port = self._server.port

    # ---- the engine's side ---------------------------------------------------------------------

    def put(self, rows: Rows, policy: Policy, stopped: Callable[[], bool] = lambda: False) -> bool:
        """See `RowWriter`. ValueError for rows of another format, or more than there is memory."""
        check(rows, self._format, "stream")
        data = parts(rows)
        size = sum(map(len, data))
        if staged_bytes(size) > len(self._memory):
            raise ValueError(f"{size} bytes of rows in a stream of {len(self._memory)}")
        offset = self._make_room(size, policy, stopped)
        if offset is None:
            with self._changed:
                self._num_dropped += 1
            return False
        sealed = write_sealed(data, offset, self._write)
        with self._changed:
            number = self._num_put
            self._num_put += 1
            self._records[number] = _Record(
                number, offset, size, len(rows.token_ids), len(data[0]), sealed
            )
            self._changed.notify_all()
        return True

    def _write(self, at: int, data: memoryview) -> None:
        self._memory[at : at + len(data)] = data

    def _make_room(self, size: int, policy: Policy, stopped: Callable[[], bool]) -> int | None:
        """Offset of a free segment; what a reader is fetching is never overwritten."""
        while True:
            try:
                return self._staging.allocate(size, patience_s=0.0)
            except NoRoom:
                pass
            with self._changed:
                oldest = self._oldest() if policy == "drop_oldest" else None
                if oldest is not None:
                    self._remove(oldest)
                    self._num_dropped += 1
                    continue
                if policy == "drop_new" or stopped():
                    return None
                self._changed.wait(_POLL_S)

    @property
    def num_dropped(self) -> int:
        with self._changed:
            return self._num_dropped

    def close(self) -> None:
        """Readers that are connected get what is left and are told of the end, unless all of them
        do nothing for as long as a lease."""
        with self._changed:
            self._ended = True
            self._progress_at = time.monotonic()
            self._changed.notify_all()
            while self._readers and time.monotonic() < self._progress_at + self._lease_s:
                self._changed.wait(_POLL_S)
            if self._records:
                logger.warning("rows of %d requests go unread", len(self._records))
        self._server.close()
        self._staging.close()
        self._transport.close()

    # ---- records, under the lock ---------------------------------------------------------------

    def _oldest(self) -> _Record | None:
        """That no reader has; leases that have run out end here."""
        now = time.monotonic()
        for record in self._records.values():  # in the order in which they were put
            if record.reader is not None and record.until < now:
                logger.warning("a reader did not fetch its record within %g s", self._lease_s)
                record.reader = None
            if record.reader is None:
                return record
        return None

    def _remove(self, record: _Record) -> None:
        del self._records[record.number]
        self._staging.free(record.offset)

    # ---- what readers ask ----------------------------------------------------------------------

    def _greet(self, connection: socket.socket, message: Message) -> None:
        """From here on the connection may be idle for as long as its machine is there."""
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self._changed:
            self._readers.add(connection)
        send(connection, {**self._hello, "description": self._transport.describe()})

    def _answer_next(self, connection: socket.socket, message: Message) -> None:
        until = time.monotonic() + min(float(message["wait_s"]), MAX_WAIT_S)
        with self._changed:
            while (record := self._oldest()) is None:
                left = until - time.monotonic()
                if left <= 0 or (self._ended and not self._records):
                    break
                self._changed.wait(min(left, _POLL_S) if self._records else left)
            reply: Message = {"dropped": self._num_dropped}
            if record is not None:
                record.reader, record.until = connection, time.monotonic() + self._lease_s
                self._progress_at = time.monotonic()
                reply["record"] = record.message
            ended = self._ended and not self._records
        send(connection, {**reply, "ended": ended})
        if ended:
            self._forget_reader(connection)

    def _answer_done(self, connection: socket.socket, message: Message) -> None:
        with self._changed:
            record = self._records.get(message["number"])
            held = record is not None and record.reader is connection
            if record is not None and held:
                self._remove(record)
                self._progress_at = time.monotonic()
                self._changed.notify_all()
        send(connection, {"held": held})

    def _forget_reader(self, connection: socket.socket) -> None:
        """What it had not fetched is for the next one."""
        with self._changed:
            self._readers.discard(connection)
            for record in self._records.values():
                if record.reader is connection:
                    record.reader = None
            self._changed.notify_all()
