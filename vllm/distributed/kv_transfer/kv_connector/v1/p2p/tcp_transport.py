# SPDX-License-Identifier: Apache-2.0
"""Bytes over plain TCP: works everywhere, and every byte is copied twice by the kernel."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence

from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import (
    CannotRegister,
    Range,
    Transport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import (
    Address,
    Deadline,
    Handler,
    Message,
    PeerLost,
    connect,
    receive_into,
    send,
)


class TcpTransport(Transport):
    """Readers show a key that only the description has."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._readable = memoryview(b"")
        self._target = memoryview(b"")
        self._peers: dict[str, tuple[Address, bytes]] = {}

    def register(self, readable: Tensor | None, target: Tensor | None) -> None:
        for memory in (readable, target):
            if memory is not None and memory.is_cuda:
                raise CannotRegister("TCP moves bytes of host memory")
        if readable is not None:
            self._readable = readable.numpy().data
        if target is not None:
            self._target = target.numpy().data

    def describe(self) -> bytes:
        return self._key

    def handlers(self) -> Mapping[str, Handler]:
        return {"read": self._send_bytes}

    def _send_bytes(self, connection: socket.socket, message: Message) -> None:
        if not secrets.compare_digest(message["key"], self._key):
            raise ValueError("the key is not of this engine")
        ranges = [(int(start), int(size)) for start, size in message["ranges"]]
        for start, size in ranges:
            if not 0 <= start <= start + size <= len(self._readable):
                raise ValueError(f"bytes {start} to {start + size} are not readable")
        for start, size in ranges:
            connection.sendall(self._readable[start : start + size])

    def connect(self, address: Address, description: bytes) -> str:
        name = f"{address[0]}:{address[1]}"
        self._peers[name] = (address, description)
        return name

    def read(self, peer: str, ranges: Sequence[Range], deadline: Deadline) -> None:
        address, key = self._peers[peer]
        wanted = [(part.remote, part.size) for part in ranges]
        with connect(address, deadline) as connection:
            try:
                connection.settimeout(deadline.left(peer))
                send(connection, {"op": "read", "key": key, "ranges": wanted})
                for part in ranges:
                    target = self._target[part.local : part.local + part.size]
                    receive_into(connection, target, deadline)
            except PeerLost:
                raise
            except TimeoutError as error:
                raise PeerLost(f"{peer}: no bytes in time") from error
            except OSError as error:
                raise PeerLost(f"{peer}: {error}") from error

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
