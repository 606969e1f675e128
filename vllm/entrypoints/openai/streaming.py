# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, and abandoning work when the client is gone."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.errors import describe
from vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client closed its connection before the reply was ready."""


def event(payload: Any) -> bytes:
    """One server-sent event holding `payload` as JSON."""
    return b"data: " + _encode(payload) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it when the client leaves; the body must have been read before.

    Raises `ClientGoneError` in that case.
    """
    gone = asyncio.create_task(_disconnected(request.receive))
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await _cancel(gone, task)


class EventStream(Response):
    """Sends server-sent events closed by `[DONE]`.

    `first` was drawn from `chunks` before, so that errors up to there got their own HTTP status;
    a later one becomes an error event. A disconnect closes `chunks`, which aborts its requests.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self.first = first
        self.chunks = chunks
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            await _cancel(sender, gone)
            await self.chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await body(self.first)
        try:
            async for chunk in self.chunks:
                await body(chunk)
        except Exception as error:
            await body(event(describe(error).body()))
        await body(DONE, more=False)
