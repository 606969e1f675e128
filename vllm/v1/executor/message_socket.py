# SPDX-License-Identifier: Apache-2.0
"""Whole messages over a TCP connection between two hosts.

A plain socket tells at once that the other process is gone, as a pipe does. The kernel looks after
the other host: one that is silent for `SILENCE_S` has lost the connection.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

import psutil

#: how long a host may not answer the kernel's probes
SILENCE_S = 20
_PROBE_S = 5

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 2**20
_FULL_POLL_MS = 100
#: the other side has closed the connection, or it is lost
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class MessageSocket:
    """One end; `peer`: the numeric address of the other one. One thread may send while another one
    takes."""

    def __init__(self, connection: socket.socket, peer: str = "") -> None:
        self._socket = connection
        self.peer = peer
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        tcp = socket.IPPROTO_TCP
        connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(tcp, socket.TCP_KEEPIDLE, _PROBE_S)
        connection.setsockopt(tcp, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(tcp, socket.TCP_KEEPCNT, SILENCE_S // _PROBE_S - 1)
        connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """The numeric address of this end."""
        return str(self._socket.getsockname()[0])

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        """Hand the message to the kernel. While the other side takes none, waits and calls `check`,
        which raises when waiting is of no use any more. `OSError` when the connection is lost."""
        view = memoryview(_LENGTH.pack(len(message)) + message)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, _FULL_POLL_MS)
                if self.is_closed():
                    raise ConnectionResetError("connection closed") from None
                check()

    def take(self) -> list[bytes]:
        """The messages that have arrived, none if not all of one has; EOFError once the other side
        has closed the connection, or it is lost, and all messages were taken."""
        try:
            self._read()
        except EOFError:
            if not self._messages:
                raise
        taken = list(self._messages)
        self._messages.clear()
        return taken

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for one message and leave others for `take`. `TimeoutError`, EOFError as there."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            left_ms = None if deadline is None else (deadline - time.monotonic()) * 1000
            if left_ms is not None and left_ms <= 0:
                raise TimeoutError(f"no message in {timeout_s:g} s")
            self._wait(select.POLLIN, left_ms)
            self._read()
        return self._messages.popleft()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(error.strerror or str(error)) from None
        if not data:
            raise EOFError("connection closed")
        self._received += data
        self._messages.extend(iter(self._next_message, None))

    def wait_until_closed(self, timeout_s: float) -> bool:
        """Whether the other side closes the connection in time. Takes nothing."""
        return bool(self._wait(select.POLLRDHUP, max(0.0, timeout_s) * 1000))

    def is_closed(self) -> bool:
        """Whether the other side has closed the connection, or it is lost."""
        return bool(self._wait(select.POLLRDHUP, 0))

    def close(self) -> None:
        self._socket.close()

    def _next_message(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message

    def _wait(self, event: int, timeout_ms: float | None) -> list[tuple[int, int]]:
        """What has happened in time, of `event` and the end of the connection."""
        poll = select.poll()
        poll.register(self._socket, event | _HUNG_UP)
        return poll.poll(timeout_ms)


def interface_of(address: str) -> str | None:
    """The network interface of this host that has the numeric `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            internet = one.family in (socket.AF_INET, socket.AF_INET6)
            if internet and one.address.partition("%")[0] == address:
                return name
    return None
