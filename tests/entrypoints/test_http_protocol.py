# SPDX-License-Identifier: Apache-2.0
"""Pieces written past `send` are chunks of the same reply, on a real connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from vllm.entrypoints.http_protocol import StreamingProtocol, take_piece_writer

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
#: as the client of Java's library sends it
OFFER = (
    b"POST /a HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 5\r\n"
    b"Host: x\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n\r\n"
)


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    """The address at which connections speak the protocol with `app`."""
    config = uvicorn.Config(app, http=StreamingProtocol, log_config=None, ws="none")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: StreamingProtocol(config, ServerState(), {}), "127.0.0.1", 0
    )
    yield server.sockets[0].getsockname()
    server.close()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (b"1.1", b"5\r\nfirst\r\n17\r\na piece of 23 bytes....\r\n4\r\nlast\r\n0\r\n\r\n"),
        (b"1.0", b"firstlast"),
    ],
)
@pytest.mark.asyncio
async def test_pieces_are_chunks_while_the_reply_is_open(version: bytes, expected: bytes) -> None:
    ready: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        writer = take_piece_writer(scope)
        assert writer is not None and take_piece_writer(scope) is None
        ready.append(writer.is_ready)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        ready.append(writer.is_ready)
        if writer.is_ready:
            writer.write(b"a piece of 23 bytes....")
        await send({"type": "http.response.body", "body": b"last", "more_body": False})
        ready.append(writer.is_ready)

    async with serving(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(REQUEST.replace(b"1.1", version))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert body == expected and (b"chunked" in head) is (version == b"1.1")
    assert ready == [False, version == b"1.1", False]


@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.asyncio
async def test_a_client_that_is_gone_or_does_not_read_gets_no_pieces(num_requests: int) -> None:
    stuck = asyncio.Event()
    over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        writer = take_piece_writer(scope)
        assert writer is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while writer.is_ready:  # until the buffers are full
            writer.write(b"x" * (1 << 16))
            await asyncio.sleep(0)
        stuck.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        over.set_result(writer.is_ready)

    request = REQUEST.replace(b"Connection: close\r\n", b"")
    async with serving(app) as address:
        # A small buffer, so that reading stops soon.
        _, writer = await asyncio.open_connection(*address, limit=1024)
        writer.write(request * num_requests)
        await writer.drain()
        await stuck.wait()
        writer.transport.abort()
        assert await asyncio.wait_for(over, 20) is False


@pytest.mark.parametrize("between", [None, 0.01], ids=["together", "apart"])
@pytest.mark.parametrize(
    ("body", "length"),
    [(b"hello", b"Content-Length: 5"), (b"5\r\nhello\r\n0\r\n\r\n", b"Transfer-Encoding: chunked")],
)
@pytest.mark.asyncio
async def test_an_offer_of_another_protocol_is_passed_over(
    body: bytes, length: bytes, between: float | None
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = scope["path"].encode(), True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        head = {"type": "http.response.start", "status": 200}
        await send({**head, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    head = OFFER.replace(b"Content-Length: 5", length)
    last = head.replace(b"/a", b"/b").replace(b": Upgrade", b": close, Upgrade")
    pieces = [head, body, last, body]
    async with serving(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        for piece in [b"".join(pieces)] if between is None else pieces:
            writer.write(piece)
            await asyncio.sleep(between or 0)
        reply = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert reply.count(b"HTTP/1.1 200") == 2
    assert reply.index(b"/ahello") < reply.index(b"/bhello")


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that does not reply."""
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize(
    "request_",
    [
        b"nothing\r\n\r\n",
        b"GET /" + b"a" * 70_000,
        b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 12_000,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: " + b"a" * 70_000,
        b"GET / HTTP/1.1\r\n\r\n" * 300,
    ],
    ids=["no HTTP", "url", "header", "headers", "trailer", "requests"],
)
@pytest.mark.asyncio
async def test_what_is_no_request_or_has_no_end_is_an_error(request_: bytes) -> None:
    async with serving(never) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request_[:64])
        # What comes together with a piece of a body is not counted.
        await asyncio.sleep(0.01)
        writer.write(request_[64:])
        reply = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == 400
