# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 connections that cost little per token: one callback per read, no tasks, no copies.

Parsing of replies is that of httptools, which the server uses too.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from typing import cast
from urllib.parse import urlsplit

import httptools

from vllm.exceptions import VLLMValidationError

_CONNECT_TIMEOUT_S = 60.0
#: Servers close idle connections, the usual ones after 5 s; no request may meet one closing.
_MAX_IDLE_S = 2.0
_DONE = b"[DONE]"


class Reply:
    """What a connection received for one request.

    While a load runs, bytes and times are only kept: a token costs no parsing. `times[i]` is when
    the read came that ended at byte `ends[i]` of the body; one read may hold many events, and an
    event may come in several reads.
    """

    __slots__ = ("body", "ends", "status", "times")

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.ends: list[int] = []
        self.times: list[float] = []

    def note_read(self, now: float) -> None:
        """Say when what is new in the body came; without effect if nothing is."""
        end = len(self.body)
        if end > (self.ends[-1] if self.ends else 0):
            self.ends.append(end)
            self.times.append(now)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Arrival time and data of each server-sent event, without the closing `[DONE]`.

        An event has come when its line is complete; a line that never ended is no event.
        """
        read = position = 0
        lines = bytes(self.body).split(b"\n")
        for line in lines[:-1]:
            position += len(line) + 1
            if not line.startswith(b"data:"):
                continue
            while self.ends[read] < position:
                read += 1
            data = line[5:].strip()
            if data != _DONE:
                yield self.times[read], data


class ExchangeError(Exception):
    """A connection that did not bring a whole reply."""


class Endpoint:
    """Where requests go: the parts of an http or https URL.

    Raises `VLLMValidationError` for any other URL.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise VLLMValidationError(f"expected http://HOST... or https://HOST..., got {url!r}")
        if parts.username is not None:
            raise VLLMValidationError(
                "a URL with a user name is not supported; use --header Authorization=..."
            )
        self.tls = parts.scheme == "https"
        self.host = parts.hostname
        self.port = parts.port or (443 if self.tls else 80)
        self._netloc = parts.netloc
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def request(self, headers: dict[str, str], body: bytes) -> bytes:
        """A POST of JSON as it goes over the wire; `headers` come before the usual ones."""
        given = {name.lower() for name in headers}
        usual = {
            "Host": self._netloc,
            "Accept": "*/*",
            "User-Agent": "vllm-bench",
            "Content-Type": "application/json",
        }
        lines = [f"POST {self._target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"{name}: {value}" for name, value in usual.items() if name.lower() not in given]
        lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Reply | None = None
        self._finished: asyncio.Future[None] | None = None
        self._has_length = False
        self._encoding = b"identity"
        self.reusable = True
        self.idle_since = 0.0

    async def exchange(self, request: bytes, reply: Reply) -> None:
        """Send `request` and fill `reply`; raises `ExchangeError`."""
        if self._transport is None or self._transport.is_closing():
            raise ExchangeError("the server closed the connection")
        self._reply, self._has_length, self._encoding = reply, False, b"identity"
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._finished
        finally:
            self._reply = self._finished = None

    def close(self) -> None:
        """Without effect on a closed connection."""
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    # ---- called by the event loop --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not derived from those of asyncio.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        reply = self._reply
        if reply is None:  # bytes that nobody asked for
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not a HTTP reply: {error}")
        reply.note_read(now)

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        reply = self._reply
        if reply is not None and reply.status and not self._has_length and error is None:
            self._finish()
        else:
            why = f": {error}" if error else ""
            self._fail(f"the server closed the connection{why}")

    # ---- called by the parser ------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        elif lowered == b"content-encoding":
            self._encoding = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._reply is None or status < 200:
            return
        self._reply.status = status
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._encoding.lower() != b"identity":
            encoding = self._encoding.decode("latin-1")
            self._fail(f"the reply is encoded as {encoding}, which was not asked for")

    def on_body(self, data: bytes) -> None:
        if self._reply is not None:
            self._reply.body += data

    def on_message_complete(self) -> None:
        # An interim reply (1xx) has no status here: the one that counts follows.
        if self._reply is not None and self._reply.status:
            self._finish()

    def _finish(self) -> None:
        self._reply = None
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def _fail(self, reason: str) -> None:
        self.close()
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(ExchangeError(reason))


class ConnectionPool:
    """Connections to one endpoint, as many as are in use at once; idle ones are used again."""

    def __init__(self, endpoint: Endpoint, context: ssl.SSLContext | None = None) -> None:
        self._endpoint = endpoint
        self._context = context if endpoint.tls else None
        self._idle: list[Connection] = []
        #: what the host's name came to, so that it is looked up once
        self._address: str | None = None

    async def exchange(self, request: bytes, reply: Reply) -> None:
        """Send `request` over an idle or a new connection and fill `reply`.

        Raises `ExchangeError`; `reply` then holds what came before.
        """
        connection = self._idle_connection() or await self.connect()
        try:
            await connection.exchange(request, reply)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            connection.idle_since = time.perf_counter()
            self._idle.append(connection)
        else:
            connection.close()

    def _idle_connection(self) -> Connection | None:
        oldest = time.perf_counter() - _MAX_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        """A new connection; raises `ExchangeError`."""
        endpoint = self._endpoint
        loop = asyncio.get_running_loop()
        attempt = loop.create_connection(
            Connection,
            self._address or endpoint.host,
            endpoint.port,
            ssl=self._context,
            server_hostname=endpoint.host if self._context else None,
        )
        try:
            transport, connection = await asyncio.wait_for(attempt, _CONNECT_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError) as error:
            reason = str(error) or f"no connection within {_CONNECT_TIMEOUT_S:g} s"
            raise ExchangeError(f"cannot connect: {reason}") from error
        self._address = transport.get_extra_info("peername")[0]
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
