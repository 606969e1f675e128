# SPDX-License-Identifier: Apache-2.0
"""gzip over HTTP: bodies that clients compress, and replies for clients that accept it."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from vllm.entrypoints.openai.asgi import HttpMiddleware
from vllm.entrypoints.openai.errors import APIError

_GZIP = 16 + zlib.MAX_WBITS
#: decompressed at once, in bytes: about a millisecond of the event loop
_PIECE = 256 * 1024
#: replies below this many bytes fit a packet anyway
_WORTH_IT = 1024
#: replies above this many bytes are compressed in a thread
_LARGE = 256 * 1024
#: the fastest: JSON of token ids shrinks by 4, at the strongest by 5 for 8 times the time
_LEVEL = 1


class CompressedBodies(HttpMiddleware):
    """Decompresses request bodies piece by piece, so that a limit further in can end it early.

    Any other `Content-Encoding` is answered with 415.
    """

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        coding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if coding in ("", "identity"):
            await self.app(scope, receive, send)
        elif coding in ("gzip", "x-gzip"):
            headers = MutableHeaders(raw=list(scope["headers"]))
            for name in ("content-encoding", "content-length"):
                del headers[name]
            await self.app({**scope, "headers": headers.raw}, _Unzip(receive).receive, send)
        else:
            error = APIError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "UnsupportedMediaType",
                f"Content-Encoding {coding!r} is not supported; send the body as gzip or plain.",
            )
            # The body is unread, so the connection cannot carry another request.
            refusal = error.response({"accept-encoding": "gzip", "connection": "close"})
            await refusal(scope, receive, send)


class _Unzip:
    """Body messages of at most `_PIECE` bytes each from compressed ones of any size."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._inflate = zlib.decompressobj(_GZIP)
        self._waiting = b""
        #: whether the last piece was full: more may come without further input
        self._full = False
        self._more = True

    async def receive(self) -> Message:
        """The next message; `APIError` for what is no complete gzip body."""
        if self._waiting or self._full:
            await asyncio.sleep(0)
        else:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._waiting = message.get("body", b"")
            self._more = message.get("more_body", False)
        body = self._next_piece()
        whole = not (self._more or self._waiting or self._full)
        if whole and not self._inflate.eof:
            raise _bad_body("it ends too early")
        return {"type": "http.request", "body": body, "more_body": not whole}

    def _next_piece(self) -> bytes:
        if self._inflate.eof and self._waiting:
            # Members may follow each other.
            self._inflate = zlib.decompressobj(_GZIP)
        try:
            body = self._inflate.decompress(self._waiting, _PIECE)
        except zlib.error as error:
            raise _bad_body(str(error)) from None
        self._waiting = self._inflate.unconsumed_tail or self._inflate.unused_data
        self._full = len(body) == _PIECE
        return body


def _bad_body(why: str) -> APIError:
    return APIError(
        HTTPStatus.BAD_REQUEST,
        "Bad Request",
        f"The body is not valid gzip, as its Content-Encoding says: {why}.",
    )


class CompressedReplies(HttpMiddleware):
    """Compresses whole replies of clients that accept gzip; streams go out as they are."""

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _accepts_gzip(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        start: Message | None = None

        async def send_compressed(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                head, start = start, None
                headers = MutableHeaders(scope=head)
                headers.add_vary_header("Accept-Encoding")
                body = message.get("body", b"")
                whole = not message.get("more_body", False)
                if whole and len(body) >= _WORTH_IT and "content-encoding" not in headers:
                    body = await _compressed(body)
                    headers["content-encoding"] = "gzip"
                    headers["content-length"] = str(len(body))
                    message = {**message, "body": body}
                await send(head)
            await send(message)

        await self.app(scope, receive, send_compressed)


def _accepts_gzip(headers: Headers) -> bool:
    """Whether `Accept-Encoding` names gzip with a weight above zero."""
    for one in headers.get("accept-encoding", "").split(","):
        coding, _, weight = one.partition(";")
        if coding.strip().lower() == "gzip":
            return weight.replace(" ", "").lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


async def _compressed(body: bytes) -> bytes:
    if len(body) <= _LARGE:
        return gzip.compress(body, _LEVEL)
    return await asyncio.to_thread(gzip.compress, body, _LEVEL)
