# SPDX-License-Identifier: Apache-2.0
"""Pieces written past `send` are chunks of the same reply, on a real connection."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from vllm.entrypoints.http_protocol import StreamingProtocol, take_piece_writer

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.mark.asyncio
async def test_pieces_are_chunks_while_the_reply_is_open() -> None:
    ready: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        writer = take_piece_writer(scope)
        assert writer is not None and take_piece_writer(scope) is None
        ready.append(writer.is_ready)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        ready.append(writer.is_ready)
        writer.write(b"a piece of 23 bytes....")
        await send({"type": "http.response.body", "body": b"last", "more_body": False})
        ready.append(writer.is_ready)

    config = uvicorn.Config(app, http=StreamingProtocol, log_config=None)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: StreamingProtocol(config, ServerState(), {}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(REQUEST)
    _, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert body == b"5\r\nfirst\r\n17\r\na piece of 23 bytes....\r\n4\r\nlast\r\n0\r\n\r\n"
    assert ready == [False, True, False]
    writer.close()
    server.close()


@pytest.mark.asyncio
async def test_a_client_that_is_gone_or_does_not_read_gets_no_pieces() -> None:
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

    config = uvicorn.Config(app, http=StreamingProtocol, log_config=None)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: StreamingProtocol(config, ServerState(), {}), "127.0.0.1", 0
    )
    # A small buffer, so that reading stops soon.
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1024)
    writer.write(REQUEST)
    await writer.drain()
    await stuck.wait()
    writer.transport.abort()
    assert await over is False
    server.close()
