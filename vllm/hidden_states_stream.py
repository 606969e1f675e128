# SPDX-License-Identifier: Apache-2.0
"""Captured hidden states for a trainer on another machine, while the engine runs.

    with RemoteRows("engine-host:5600") as stream:
        for rows in stream:
            train(rows.token_ids, rows.hidden_states)

The engine runs a `NixlHiddenStatesConnector` or a `StreamHiddenStatesConnector`. Any number of
readers share it: each record goes to one of them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_stream import (
    MAX_WAIT_S,
    VERSION,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.nixl_transport import NixlTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.tcp_transport import TcpTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import (
    Range,
    StillWriting,
    Transport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import (
    Address,
    Deadline,
    Message,
    PeerLost,
    connect,
    receive,
    send,
)
from vllm.hidden_states_record import Rows, RowsBroken, damage, data_bytes, decode
from vllm.hidden_states_storage import STORAGE_DTYPES, RowFormat
from vllm.utils.own_process import OwnProcess

__all__ = ["RemoteRows", "Rows", "StreamBroken", "StreamRefused"]

#: an engine that answers nothing for so long is given up
_ANSWER_S = 30.0
#: memory through which records arrive, larger ones in several reads
_BUFFER_BYTES = 64 * 2**20
#: longest message of an engine
_MAX_MESSAGE_BYTES = 4 * 2**20
#: memory that a failed read may still write to
_abandoned: list[Tensor] = []


class StreamBroken(RowsBroken):
    """The engine died or hangs, or what arrived is not what it wrote."""


class StreamRefused(RuntimeError):
    """The engine's rows are not those that the reader wants; the message names the field."""


class RemoteRows:
    """Takes records from the engine at `address` (`HOST:PORT`); waits `timeout_s` for it to answer.

    `expect`: what the rows have to be, of `layer_ids`, `hidden_size`, `dtype` ("bfloat16") and
    `storage` ("auto"); `about` has all four. Rows that are stored in eight bits come back in the
    model's dtype; with `raw` as they are, with their scales. For one thread of one process.

    TimeoutError if nobody answers, `StreamRefused` for other rows, ValueError for no address;
    ImportError where the engine's bytes move through NIXL and the library is missing here.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 60.0,
        raw: bool = False,
        expect: Mapping[str, Any] | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"{address!r} is no address: give HOST:PORT")
        self._address: Address = host, int(port)
        self._label, self._raw = address, raw
        self._process = OwnProcess()
        self._ended = False
        self._broken: str | None = None
        #: requests whose rows the engine dropped for want of room, when it last answered
        self.num_dropped = 0
        hello = self._connect(timeout_s)
        try:
            self.about, self._format = self._understand(hello, expect or {})
            self._lease_s = float(hello["lease_s"])
            self._transport = _make_transport(hello["transport"])
        except BaseException:
            self._connection.close()
            raise
        try:
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
            self._transport.register(None, self._buffer)
            self._peer = self._transport.connect(self._address, hello["description"])
        except BaseException:
            self._connection.close()
            self._transport.close()
            raise

    def _connect(self, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left = max(deadline - time.monotonic(), 0.1)
                self._connection = connect(self._address, Deadline(left))
                try:
                    return self._exchange({"op": "hello", "version": VERSION}, left)
                except BaseException:
                    self._connection.close()
                    raise
            except PeerLost as error:
                if time.monotonic() > deadline:
                    message = f"no engine answers at {self._label}: {error}"
                    raise TimeoutError(message) from error
            time.sleep(0.05)

    def _exchange(self, message: Message, patience_s: float) -> Message:
        """`PeerLost` without an answer in time."""
        deadline = Deadline(patience_s)
        try:
            self._connection.settimeout(patience_s)
            send(self._connection, message)
            reply = receive(self._connection, _MAX_MESSAGE_BYTES, deadline)
        except PeerLost:
            raise
        except OSError as error:
            raise PeerLost(f"{self._label}: {error}") from error
        if reply is None:
            raise PeerLost(f"{self._label}: the engine has gone")
        if "error" in reply:
            raise StreamRefused(f"{self._label}: {reply['error']}")
        return reply

    def _understand(
        self, hello: Message, expect: Mapping[str, Any]
    ) -> tuple[dict[str, Any], RowFormat]:
        """What the engine's rows are."""
        self._compare("version", hello.get("version"), VERSION)
        about: dict[str, Any] = hello["rows"]
        for field, wanted in expect.items():
            if field not in about:
                raise StreamRefused(f"{field} is nothing that rows have: {', '.join(about)}")
            self._compare(field, about[field], wanted)
        dtype, storage = vars(torch).get(about["dtype"]), about["storage"]
        if not isinstance(dtype, torch.dtype):
            raise self._refused("dtype", about["dtype"], "one of torch's")
        if storage not in STORAGE_DTYPES:
            raise self._refused("storage", storage, f"one of {', '.join(STORAGE_DTYPES)}")
        return about, RowFormat(len(about["layer_ids"]), about["hidden_size"], dtype, storage)

    def _compare(self, field: str, found: Any, wanted: Any) -> None:
        if found != (list(wanted) if isinstance(wanted, tuple) else wanted):
            raise self._refused(field, found, repr(wanted))

    def _refused(self, field: str, found: Any, wanted: str) -> StreamRefused:
        return StreamRefused(f"{self._label}: {field} is {found!r} there, wanted is {wanted}")

    def get(self, timeout_s: float | None = None) -> Rows | None:
        """The next request's rows; None when the engine has ended and everything was read.

        TimeoutError if none come in time; `StreamBroken` if the engine died or hangs, for good, and
        for a record that arrives damaged, which is lost.
        """
        if not self._process.is_own:
            raise RuntimeError("a stream belongs to the process that opened it: open one in each")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended:
            left = MAX_WAIT_S if deadline is None else max(deadline - time.monotonic(), 0.0)
            if self._broken is not None:
                raise StreamBroken(self._broken)
            try:
                reply = self._exchange({"op": "next", "wait_s": left}, left + _ANSWER_S)
                self.num_dropped = int(reply["dropped"])
                self._ended = bool(reply["ended"])
                record = reply.get("record")
                if record is not None and (rows := self._take(record)) is not None:
                    return rows
            except (PeerLost, StillWriting) as error:
                if isinstance(error, StillWriting):
                    _abandoned.append(self._buffer)
                self._broken = f"the engine has died, or cannot be reached any more: {error}"
                raise StreamBroken(self._broken) from error
            if record is None and not self._ended and left == 0:
                raise TimeoutError(f"no rows within {timeout_s} s")
        return None

    def _take(self, record: Message) -> Rows | None:
        """A leased record's rows; None if the lease ran out, so that another reader gets it."""
        size, num_rows, id_bytes = (record[name] for name in ("size", "num_rows", "id_bytes"))
        if size != data_bytes(num_rows, self._format.row_bytes, id_bytes):
            raise StreamBroken(f"a record of {size} bytes has {num_rows} rows")
        data, deadline = bytearray(size), Deadline(self._lease_s)
        arrived = memoryview(self._buffer.numpy().data)
        for start in range(0, size, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, size - start)
            self._transport.read(self._peer, [Range(record["offset"] + start, 0, count)], deadline)
            data[start : start + count] = arrived[:count]
        if not self._exchange({"op": "done", "number": record["number"]}, _ANSWER_S)["held"]:
            return None
        if problem := damage(data, record["sealed"]):
            raise StreamBroken(problem)
        return decode(data, id_bytes, num_rows, self._format, self._raw)

    def __iter__(self) -> Iterator[Rows]:
        while (rows := self.get()) is not None:
            yield rows

    def close(self) -> None:
        self._connection.close()
        self._process.run_if_own(self._transport.close)

    def __enter__(self) -> RemoteRows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _make_transport(name: str) -> Transport:
    if name == "nixl":
        return NixlTransport(f"rows-{uuid.uuid4().hex}")
    if name == "tcp":
        return TcpTransport()
    raise StreamRefused(f"transport is {name!r} there, which is not known to this version")
