# SPDX-License-Identifier: Apache-2.0
"""`vllm proxy` when servers die, hang or break off: who answers instead, and what clients see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.entrypoints.proxied_servers import BODY, POST, STATE, RealServer, Servers, json_reply
from vllm.entrypoints.proxy.app import build_app
from vllm.entrypoints.proxy.args import ProxyArgs


@pytest.mark.asyncio
async def test_a_dead_prefill_server_is_replaced_and_comes_back() -> None:
    servers = Servers()
    async with servers.proxy(health_interval=0.01) as client:
        servers.down = {"p0"}
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert servers.hosts() == ["p1", "d0"]
        shown = (await client.get("/health")).json()
        assert [one["healthy"] for one in shown["prefill"]] == [False, True]
        servers.down = set()
        while not all(o["healthy"] for o in (await client.get("/health")).json()["prefill"]):
            await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_without_prefill_servers_the_prompt_is_computed_with_the_answer() -> None:
    servers = Servers(down={"p0", "p1"})
    async with servers.proxy() as client:
        reply = await client.post("/v1/completions", json=BODY)
        assert reply.status_code == 200 and servers.seen[0][1] == BODY
        assert (await client.get("/health")).status_code == 200


@pytest.mark.asyncio
async def test_a_failing_decode_server_is_replaced_with_the_same_state() -> None:
    servers = Servers(replies={"d0": lambda: json_reply(500, {"error": "d0"})})
    async with servers.proxy() as client:
        reply = await client.post("/v1/completions", json=BODY)
        assert reply.json() == {"text": "from d1"} and servers.hosts() == ["p0", "d0", "d1"]
        assert servers.seen[2][1]["kv_transfer_params"] == STATE
        servers.down = {"d1"}
        reply = await client.post("/v1/completions", json=BODY)
        assert reply.status_code in (500, 503)
        servers.down = {"d0", "d1"}
        reply = await client.post("/v1/completions", json=BODY)
        assert reply.status_code == 503 and "no decode server" in reply.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/v1/models")).status_code == 503


@pytest.mark.parametrize("where", ["p0", "d0", "body of d0"])
@pytest.mark.asyncio
async def test_a_server_that_hangs_is_left_before_its_first_byte(where: str) -> None:
    """Its /health does not answer either; no connection ends. The same request goes elsewhere."""
    host = where.split()[-1]

    async def silence() -> AsyncIterator[bytes]:
        servers.looks[host] = [False] * 10_000
        try:
            await asyncio.sleep(60)
        finally:
            servers.stopped.append(host)
        yield b"late"

    servers = Servers()
    if where.startswith("body"):
        servers.replies[host] = lambda: httpx.Response(200, content=silence())
    else:
        servers.hanging.add(host)
    async with servers.proxy(health_interval=0.01) as client:
        reply = await asyncio.wait_for(client.post("/v1/completions", json=BODY), 50)
        assert reply.status_code == 200 and reply.json() == {"text": f"from {servers.hosts()[-1]}"}
        assert servers.hosts() == (["p0", "p1", "d0"] if host == "p0" else ["p0", "d0", "d1"])
        assert servers.stopped == [host] and servers.seen[-1][1]["kv_transfer_params"] == STATE
        shown = (await client.get("/health")).json()
        assert all(one["running"] == 0 for kind in shown.values() for one in kind)


@pytest.mark.asyncio
async def test_one_look_that_fails_is_no_hang() -> None:
    """A server that was busy for a moment keeps what it works on."""
    servers = Servers()

    async def slow() -> AsyncIterator[bytes]:
        servers.looks["d0"] = [False, True, False, True]
        first = servers.num_looks
        while servers.looks["d0"] or servers.num_looks < first + 8:
            await asyncio.sleep(0.001)
        yield b'"slow"'

    servers.replies["d0"] = lambda: httpx.Response(200, content=slow())
    async with servers.proxy(health_interval=0.001) as client:
        reply = await asyncio.wait_for(client.post("/v1/completions", json=BODY), 50)
        assert reply.json() == "slow" and servers.hosts() == ["p0", "d0"]


@pytest.mark.asyncio
async def test_a_connection_that_a_server_does_not_keep_is_no_death() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with RealServer(answer) as server, server.proxy() as client:
        for _ in range(3):
            reply = await client.post("/v1/completions", json=BODY)
            assert (reply.status_code, reply.content) == (200, b"{}"), reply.text


@pytest.mark.asyncio
async def test_an_answer_that_breaks_off(caplog: pytest.LogCaptureFixture) -> None:
    """Its client sees no end, the log says why in a line, and the server is left out."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await writer.drain()
        writer.close()

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async with RealServer(answer) as server:
        app = build_app(ProxyArgs(prefill=[server.url], decode=[server.url], health_interval=60))
        async with app.router.lifespan_context(app):
            body = json.dumps({**BODY, "n": 2}).encode()
            received = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> dict[str, Any]:
                if received:
                    return received.pop()
                await asyncio.sleep(60)
                return {"type": "http.disconnect"}

            await asyncio.wait_for(app(POST, receive, send), 60)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
                shown = (await client.get("http://proxy/health")).json()["decode"][0]
    assert [message.get("body", b"") for message in sent] == [b"", b"one"]
    assert sent[-1]["more_body"]
    assert f"{server.url}/v1/completions has not sent all of an answer: Remote" in caplog.text
    assert "Traceback" not in caplog.text
    assert (shown["healthy"], shown["running"]) == (False, 0)


@pytest.mark.asyncio
async def test_no_prompt_is_computed_for_nobody() -> None:
    """Its state would be kept for a whole lease."""
    servers = Servers(down={"d0", "d1"})
    async with servers.proxy() as client:
        reply = await client.post("/v1/completions", json=BODY)
        assert reply.status_code == 503 and servers.hosts() == []
