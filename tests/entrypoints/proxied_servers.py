# SPDX-License-Identifier: Apache-2.0
"""What `vllm proxy` sends requests to: servers in this process, and one at a port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm.entrypoints.proxy.app import build_app
from vllm.entrypoints.proxy.args import ProxyArgs

STATE = {"do_remote_prefill": True, "remote_request_id": "p-1"}
#: an ASGI request
POST = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "headers": [],
    "query_string": b"",
    "http_version": "1.1",
    "scheme": "http",
}
BODY = {"model": "m", "prompt": "hello", "max_tokens": 9, "stop": ["x"], "logprobs": 2}


def json_reply(status: int, value: Any) -> httpx.Response:
    """A reply whose body comes when it is read, as over a network."""
    return httpx.Response(status, content=pieces_of(json.dumps(value).encode()))


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@dataclass
class Servers:
    """Two servers of each kind at p0, p1, d0 and d1; `down`: those that refuse connections."""

    seen: list[tuple[str, dict[str, Any], httpx.Headers]] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    #: host -> reply instead of its usual one
    replies: dict[str, Callable[[], httpx.Response]] = field(default_factory=dict)
    #: hosts that do not answer, and those of them that were told to stop
    hanging: set[str] = field(default_factory=set)
    stopped: list[str] = field(default_factory=list)
    #: host -> what its next looks at /health find; it is well after that
    looks: dict[str, list[bool]] = field(default_factory=dict)
    num_looks: int = 0
    #: whom the proxy has asked to check a request, which one; the reply of all instead of 200
    checked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refusal: Callable[[], httpx.Response] | None = None

    async def handle(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host in self.down:
            raise httpx.ConnectError("refused")
        if request.url.path == "/health":
            self.num_looks += 1
            if (looks := self.looks.get(host)) and not looks.pop(0):
                raise httpx.ReadTimeout("no answer")
            return httpx.Response(200)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": host}]})
        body = json.loads(await request.aread())
        if request.url.path.endswith("/render"):
            self.checked.append((f"{host}{request.url.path}", body))
            return httpx.Response(200) if self.refusal is None else self.refusal()
        self.seen.append((host, body, request.headers))
        if host in self.hanging:
            self.looks[host] = [False] * 10_000
            try:
                await asyncio.sleep(60)
            finally:
                self.stopped.append(host)
        if host in self.replies:
            return self.replies[host]()
        if host.startswith("p"):
            return json_reply(200, {"choices": [], "kv_transfer_params": STATE})
        return json_reply(200, {"text": f"from {host}"})

    @asynccontextmanager
    async def proxy(self, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the proxy."""
        args = ProxyArgs(
            prefill=["http://p0", "http://p1/"], decode=["http://d0", "http://d1"], **options
        )
        app = build_app(args, httpx.MockTransport(self.handle))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
                yield client

    def hosts(self) -> list[str]:
        return [host for host, _, _ in self.seen]


class RealServer:
    """At a port, for an `httpx` that has connections; `answer` writes a reply to a request."""

    def __init__(self, answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._answer = answer
        self.url = ""

    async def __aenter__(self) -> RealServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Says that the connection may be kept, and drops it as the next request comes."""
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: " in head:
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
        if head.startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        else:
            await self._answer(writer)
        await reader.read(1)
        writer.transport.abort()

    @asynccontextmanager
    async def proxy(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of a proxy to this server for both."""
        args = ProxyArgs(prefill=[self.url], decode=[self.url], health_interval=60)
        app = build_app(args)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
                yield client
