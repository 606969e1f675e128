# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, and abandoning work when the client is gone."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.http_protocol import PieceWriter
from vllm.entrypoints.openai.errors import APIError, describe
from vllm.entrypoints.openai.middleware import direct_way
from vllm.logger import init_logger


class Deadline:
    """Starts with the request; `timeout_s` None never ends."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        """Seconds left, 0 when it is over, None when there is no end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def error(self) -> APIError:
        """What the client of a late request is told."""
        return APIError(
            HTTPStatus.GATEWAY_TIMEOUT,
            "TimeoutError",
            f"The request took longer than {self._timeout_s:g} s (--request-timeout) and was "
            "aborted; ask for fewer tokens or try again when the server is less busy.",
        )


def shutting_down() -> APIError:
    """What clients are told whose requests outlast --shutdown-timeout."""
    return APIError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "ServiceUnavailable",
        "The server is shutting down and the request was aborted.",
    )


logger = init_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
#: how long a client that does not read can hold up the end of its stream
_LAST_WORDS_S = 1.0
_json = msgspec.json.Encoder().encode
#: what many clients (httpx's `iter_lines`, Python's `splitlines`) take for the end of a line; an
#: event has to be one line
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
#: takes the place of the text while its surroundings are encoded
_STAND_IN = "\0text"


class ClientGoneError(Exception):
    """The client closed its connection before the reply was ready."""


def _encode(payload: Any) -> bytes:
    """`payload` as JSON in one line, whoever reads it."""
    encoded = _json(payload)
    if encoded.isascii():
        return encoded
    for end, escaped in _LINE_ENDS.items():
        encoded = encoded.replace(end, escaped)
    return encoded


def event(payload: Any) -> bytes:
    """One server-sent event holding `payload` as JSON."""
    return b"data: " + _encode(payload) + b"\n\n"


class TextEvents:
    """Events of one stream that differ in one text: what surrounds the text is encoded once.

    `payload`: the object for a text. Nothing after the text in its JSON may hold the text's
    stand-in, which starts with a NUL.
    """

    def __init__(self, payload: Callable[[str], Any]) -> None:
        self._before, _, self._after = event(payload(_STAND_IN)).rpartition(_encode(_STAND_IN))

    def event(self, text: str) -> bytes:
        """The same bytes as `event(payload(text))`."""
        return self._before + _encode(text) + self._after


def named_event(payload: dict[str, Any]) -> bytes:
    """One server-sent event whose name is the `type` of its payload."""
    return b"event: " + payload["type"].encode() + b"\n" + event(payload)


def openai_end(error: Exception | None) -> bytes:
    """The end of a chat or completion stream: the error, if one ended it, and `[DONE]`."""
    return DONE if error is None else event(describe(error).body()) + DONE


class Outlet:
    """Where events of one reply may be written without waiting: open while the reply is sent and
    its connection takes data."""

    def __init__(self) -> None:
        self._writer: PieceWriter | None = None

    def open(self, writer: PieceWriter | None) -> None:
        """From now on all earlier events have been sent whenever the source waits for its own."""
        self._writer = writer

    def close(self) -> None:
        """No event may be written any more."""
        self._writer = None

    @property
    def is_ready(self) -> bool:
        """Whether an event may be written now."""
        return self._writer is not None and self._writer.is_ready

    def write(self, events: bytes) -> None:
        """Write events, where `is_ready`."""
        assert self._writer is not None
        self._writer.write(events)


@dataclass(frozen=True)
class EventSource:
    """The encoded events of one reply; `end` gives what follows them, or the error in between.

    `outlet`: where the source may write events while its consumer waits for the next ones.
    """

    chunks: AsyncGenerator[bytes, None]
    end: Callable[[Exception | None], bytes] = openai_end
    outlet: Outlet | None = None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T], deadline: Deadline) -> T:
    """Await `work`, cancelling it when the client leaves; the body must have been read before.

    Raises `ClientGoneError` in that case, `APIError` when `deadline` is over first.
    """
    gone = asyncio.create_task(_disconnected(request.receive))
    task = asyncio.create_task(work)
    try:
        await asyncio.wait(
            {gone, task}, timeout=deadline.remaining_s(), return_when=asyncio.FIRST_COMPLETED
        )
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise deadline.error()
    finally:
        await _cancel(gone, task)


class EventStream(Response):
    """Sends server-sent events.

    `first` was drawn from `source` before, so that errors up to there got their own HTTP status;
    a later one becomes an error event, as does the end of `deadline` or of the server. Whatever
    ends the stream closes the source, which aborts its requests.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, source: EventSource, deadline: Deadline) -> None:
        super().__init__()
        self.first = first
        self.chunks = source.chunks
        self.end = source.end
        self.outlet = source.outlet or Outlet()
        self.deadline = deadline
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_until_over(scope, receive, send)
        finally:
            self.outlet.close()
            await self.chunks.aclose()

    async def _send_until_over(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send_all(scope, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait(
                {sender, gone},
                timeout=self.deadline.remaining_s(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if sender.done():
                sender.result()
            elif not gone.done():
                await self._give_up(sender, send, self.deadline.error())
        except asyncio.CancelledError:
            # The server stops and waits no longer. It needs no word back: it looks at its tasks.
            await self._give_up(sender, send, shutting_down())
        finally:
            await _cancel(sender, gone)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        way = direct_way(scope, send)
        await send({"type": "http.response.body", "body": self.first, "more_body": True})
        self.outlet.open(way.writer)
        try:
            async for chunk in self.chunks:
                await way.send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            await self._send_end(send, error)
        else:
            await self._send_end(send, None)

    async def _send_end(self, send: Send, error: Exception | None) -> None:
        self.outlet.close()
        await send({"type": "http.response.body", "body": self.end(error), "more_body": False})

    async def _give_up(self, sender: asyncio.Task[None], send: Send, error: Exception) -> None:
        await _cancel(sender)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._send_end(send, error), _LAST_WORDS_S)
