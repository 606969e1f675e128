# SPDX-License-Identifier: Apache-2.0
"""The server's end of an HTTP connection, with a short way for the pieces of a reply."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.tally import Tally

#: where the ASGI scope of a request has its `PieceWriter`
_KEY = "vllm.piece_writer"
#: headers that offer another protocol, and options of `Connection` that name them
_OF_OFFERS = (b"upgrade", b"http2-settings")
#: bytes of a head, of what frames a body, or of what follows it, that may come without an end: the
#: parser's time grows with their square
_MAX_UNREAD = 64 * 1024
#: requests of one connection that may wait for the reply to another
_MAX_WAITING = 256


class PieceWriter:
    """Writes pieces of one reply without a task: between its head and its end, while the
    connection is open and takes data."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def is_ready(self) -> bool:
        """Whether a piece may be written now; else send it and wait as long as that takes."""
        cycle = self.cycle
        return (
            not self._flow.write_paused
            and cycle.chunked_encoding is True
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, piece: bytes) -> None:
        """Write a piece that is not empty, where `is_ready`."""
        self._write(b"%x\r\n%b\r\n" % (len(piece), piece))


class StreamingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose requests bring their `PieceWriter`.

    A request that offers to go on in another protocol is answered in this one: the clients of Java
    offer h2c with every request. Replies of unknown length to clients of HTTP/1.0, which has no
    chunks, end with the connection. A client that leaves ends the request that runs, whatever it
    has sent behind it. A head without an end is an error, as are many requests that do not wait
    for replies.
    """

    #: bytes since the last head or piece of a body was complete
    _num_unread = 0
    #: of the request that is read, its head without the offer; empty if it has none
    _plain_head = b""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: requests without a complete reply, of which the first one runs
        self._open: deque[RequestResponseCycle] = deque()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._num_unread += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._num_unread > _MAX_UNREAD:
            self.send_400_response(f"The head of a request has at most {_MAX_UNREAD} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Close, with the error where no reply has begun."""
        self.logger.warning(msg)
        if not any(one.response_started and not one.response_complete for one in self._open):
            body = msgspec.json.encode(APIError(HTTPStatus.BAD_REQUEST, "Bad Request", msg).body())
            head = (
                *(b"HTTP/1.1 400 Bad Request", b"content-type: application/json"),
                *(b"content-length: %d" % len(body), b"connection: close"),
            )
            self.transport.write(b"\r\n".join([*head, b"", body]))
        self.transport.close()

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                # The parser takes what follows the head for the other protocol.
                rest, data = data[stop.args[0] :], b""
                if self._plain_head:
                    data, self._plain_head = self._plain_head + rest, b""
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def on_headers_complete(self) -> None:
        self._num_unread = 0
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            version = self.parser.get_http_version().encode()
            lines = [b"%b %b HTTP/%b" % (method, self.url, version), *_without_offer(self.headers)]
            self._plain_head = b"\r\n".join([*lines, b"", b""])
            return
        if len(self.pipeline) >= _MAX_WAITING:
            raise httptools.HttpParserError("too many requests wait for the reply to another")
        if self.parser.get_http_version() == "1.0" and not self._open:
            self.app = _without_chunks(self.app)
        super().on_headers_complete()
        # The request's task, which has the same scope, begins later.
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope[_KEY] = PieceWriter(self.cycle)  # type: ignore[literal-required]
            while self._open and self._open[0].response_complete:
                self._open.popleft()
            self._open.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unread = 0
        if not self._plain_head:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for one in self._open:
            one.disconnected = not one.response_complete
            one.message_event.set()
        super().connection_lost(exc)


def _without_offer(headers: list[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """The lines of a head without what offers another protocol."""
    for name, value in headers:
        if name == b"connection":
            kept = [part for part in value.split(b",") if part.strip().lower() not in _OF_OFFERS]
            value = b",".join(kept)
        if name not in _OF_OFFERS:
            yield name + b": " + value


def _without_chunks(app: ASGIApp) -> ASGIApp:
    """`app`, the length of whose replies nobody needs to know before their end."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        cycle = scope[_KEY].cycle

        async def send_plain(message: Message) -> None:
            # As if so many bytes had been announced.
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return wrapped


def take_piece_writer(scope: Scope) -> PieceWriter | None:
    """What writes pieces of the reply; None where another server has the connection.

    The scope has it no longer: they would keep each other alive.
    """
    return scope.pop(_KEY, None)


def limited_protocol(max_connections: int, tally: Tally) -> type[StreamingProtocol]:
    """The server's protocol, whose connections over the limit answer 503 to everything; `tally`:
    the open ones of all processes that serve."""
    refusal = APIError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "ServiceUnavailable",
        f"The server has {max_connections} open connections (--max-connections). Please try again "
        "later.",
    ).response({"retry-after": "1", "connection": "close"})

    class LimitedProtocol(StreamingProtocol):
        """Counts itself, while it is one too many as well."""

        def connection_lost(self, exc: Exception | None) -> None:
            tally.leave()
            super().connection_lost(exc)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if tally.try_enter(max_connections):
                return
            tally.enter()
            # Closing at once would often lose the answer: the client's request, unread, makes the
            # system reset the connection. So wait for the request, but not for ever.
            self.app = refusal
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    return LimitedProtocol
