# SPDX-License-Identifier: Apache-2.0
"""Messages between engines: msgpack with a length before it, over TCP.

A peer that died answers with a reset connection at once; one that hangs is given up at the
deadline. Whoever can connect may ask: keep the port inside the cluster's network.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vllm.logger import init_logger

logger = init_logger(__name__)

_LENGTH = struct.Struct("!I")
#: longest message: a description of a million blocks fits
MAX_BYTES = 64 * 2**20
#: characters of a peer's reason that are shown
_MAX_ERROR_LENGTH = 1000
#: an idle connection is closed after so many seconds
_IDLE_S = 60.0

Address = tuple[str, int]
Message = dict[str, Any]
#: answers one message on its connection
Handler = Callable[[socket.socket, Message], None]


class PeerLost(ConnectionError):
    """A peer cannot be reached, does not answer in time, or went away."""


class PeerRefused(RuntimeError):
    """A peer answered that it will not."""


class Deadline:
    """A point in time `seconds` after `since` (monotonic), or from now."""

    def __init__(self, seconds: float, since: float | None = None) -> None:
        self._seconds = seconds
        self._end = (time.monotonic() if since is None else since) + seconds

    def left(self, what: str) -> float:
        """Seconds left, above 0; `PeerLost` when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise PeerLost(f"{what}: no answer within {self._seconds:g} s")
        return left

    def postpone(self, seconds: float) -> None:
        """The peer was not waited for during so many seconds."""
        self._end += seconds


def send(connection: socket.socket, message: Message) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(
    connection: socket.socket, max_bytes: int = MAX_BYTES, deadline: Deadline | None = None
) -> Message | None:
    """The next message; None at the end of the connection. `PeerLost` for one cut off, longer than
    `max_bytes`, or none of ours."""
    head = bytearray(_LENGTH.size)
    if not receive_into(connection, memoryview(head), deadline, may_end=True):
        return None
    (size,) = _LENGTH.unpack(head)
    if size > max_bytes:
        raise PeerLost(f"a message of {size} bytes, more than {max_bytes}: not one of ours")
    data = bytearray(size)
    receive_into(connection, memoryview(data), deadline)
    try:
        message: Message = msgspec.msgpack.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PeerLost(f"a message that cannot be read: {error}") from error
    return message


def receive_into(
    connection: socket.socket,
    view: memoryview,
    deadline: Deadline | None = None,
    may_end: bool = False,
) -> bool:
    """Fill `view`; False at the end of the connection before its first byte, if that is allowed.
    `deadline` holds for all of it, however few bytes come at a time."""
    done = 0
    while done < len(view):
        if deadline is not None:
            connection.settimeout(deadline.left("the peer"))
        count = connection.recv_into(view[done:])
        if count == 0:
            if may_end and done == 0:
                return False
            raise PeerLost("the connection ended in the middle of a message")
        done += count
    return True


def connect(address: Address, deadline: Deadline) -> socket.socket:
    """A connection; `PeerLost` if there is nobody."""
    what = f"{address[0]}:{address[1]}"
    try:
        connection = socket.create_connection(address, timeout=deadline.left(what))
    except (OSError, ValueError, OverflowError) as error:  # a name or a port that cannot be one
        raise PeerLost(f"{what}: {error}") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def ask(
    address: Address, message: Message, deadline: Deadline, max_bytes: int = MAX_BYTES
) -> Message:
    """One question, whose answer has `max_bytes` at most; `PeerLost`, or `PeerRefused` with the
    peer's reason."""
    what = f"{address[0]}:{address[1]}"
    with connect(address, deadline) as connection:
        try:
            connection.settimeout(deadline.left(what))
            send(connection, message)
            reply = receive(connection, max_bytes, deadline)
        except TimeoutError as error:
            raise PeerLost(f"{what}: no answer in time") from error
        except OSError as error:
            raise PeerLost(f"{what}: {error}") from error
    if reply is None:
        raise PeerLost(f"{what}: the connection ended without an answer")
    if "error" in reply:
        raise PeerRefused(f"{what}: {_for_log(reply['error'])}")
    return reply


def _for_log(text: object) -> str:
    """What a peer wrote, as one line of a bearable length."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:_MAX_ERROR_LENGTH])


class MessageServer:
    """Answers messages by their `op`, a thread per connection; OSError if it cannot listen.

    `ended` is called with every connection that has ended, on its thread."""

    def __init__(
        self,
        host: str,
        port: int,
        handlers: Mapping[str, Handler],
        ended: Callable[[socket.socket], None] = lambda connection: None,
    ) -> None:
        self._handlers = handlers
        self._ended = ended
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            where = f"host {host!r} and port {port} of kv_connector_extra_config"
            instead = "give an address of this machine and a port that is free, or 0"
            raise OSError(f"cannot listen at {where}: {error.strerror}; {instead}") from error
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="kv-p2p", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                if self._closing:
                    connection.close()
                    return
                self._open[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_IDLE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (message := receive(connection)) is not None:
                    self._answer(connection, message)
        except OSError as error:
            logger.debug("a peer's connection ended: %s", error)
        finally:
            with self._lock:
                self._open.pop(connection, None)
            self._ended(connection)

    def _answer(self, connection: socket.socket, message: Message) -> None:
        handler = self._handlers.get(str(message.get("op")))
        if handler is None:
            send(connection, {"error": f"unknown op {message.get('op')!r}"})
            return
        try:
            handler(connection, message)
        except (KeyError, TypeError, ValueError) as error:
            send(connection, {"error": f"{type(error).__name__}: {error}"})
            # Whoever waits for bytes and not for a message is told by the end of the connection.
            raise PeerLost(f"a message that cannot be answered: {error}") from error

    def close(self) -> None:
        """Cut all connections off and wait for the threads."""
        with self._lock:
            self._closing = True
            threads = list(self._open.values())
            for connection in self._open:
                _cut(connection)
        _cut(self._listener)
        self._listener.close()
        for thread in (self._acceptor, *threads):
            thread.join()


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # its thread closed it
