# SPDX-License-Identifier: Apache-2.0
"""`vllm proxy`: who gets which request, and what happens when servers fail."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn

from vllm.entrypoints.cli.main import main
from vllm.entrypoints.http_protocol import StreamingProtocol
from vllm.entrypoints.proxy.app import build_app
from vllm.entrypoints.proxy.args import ProxyArgs
from vllm.entrypoints.proxy.server import ProxyServer

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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.asyncio
async def test_prompt_first_then_the_answer(path: str) -> None:
    servers = Servers()
    async with servers.proxy() as client:
        sent = {**BODY, "max_completion_tokens": 9, "stream": True, "stream_options": {"x": 1}}
        reply = await client.post(path, json=sent, headers={"authorization": "Bearer k"})
    assert reply.status_code == 200 and reply.json() == {"text": "from d0"}
    (_, first, headers), (_, second, other_headers) = servers.seen
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    expected = {"model": "m", "prompt": "hello", "max_tokens": 1, "stream": False}
    assert first == {**expected, "kv_transfer_params": asked}
    assert second == {**sent, "kv_transfer_params": STATE}
    assert headers["authorization"] == other_headers["authorization"] == "Bearer k"
    assert headers["x-request-id"] == other_headers["x-request-id"] != ""


@pytest.mark.asyncio
async def test_servers_take_turns() -> None:
    servers = Servers()
    async with servers.proxy() as client:
        for _ in range(4):
            await client.post("/v1/completions", json=BODY)
    assert servers.hosts() == ["p0", "d0", "p1", "d1"] * 2


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2},
        {"best_of": 3},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2]]},
        {"use_beam_search": True},
        {"kv_transfer_params": {"a": 1}},
    ],
)
@pytest.mark.asyncio
async def test_what_one_engine_answers_alone(extra: dict[str, Any]) -> None:
    servers = Servers()
    async with servers.proxy() as client:
        await client.post("/v1/completions", json={**BODY, **extra})
        await client.post("/v1/completions", json={**BODY, "prompt": [1, 2], "n": 1, "echo": False})
    assert servers.hosts() == ["d0", "p0", "d1"]
    assert servers.seen[0][1] == {**BODY, **extra}


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


@pytest.mark.asyncio
async def test_a_wrong_request_is_told_by_the_first_engine() -> None:
    servers = Servers(replies={"p0": lambda: json_reply(400, {"error": "bad prompt"})})
    async with servers.proxy() as client:
        reply = await client.post("/v1/completions", json=BODY)
        assert (reply.status_code, reply.json()) == (400, {"error": "bad prompt"})
        assert servers.hosts() == ["p0"]
        reply = await client.post("/v1/completions", content=b"[1]")
        assert reply.status_code == 400 and "not a JSON object" in reply.json()["error"]["message"]
        assert (await client.get("/v1/models")).json() == {"data": [{"id": "d0"}]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.asyncio
async def test_what_a_second_engine_refuses_is_not_computed_by_a_first(path: str) -> None:
    """Of fields that the first one does not get, too."""
    told = {"error": {"message": "min_tokens is above max_tokens"}}
    servers = Servers(hanging={"p0"}, refusal=lambda: json_reply(400, told))
    async with servers.proxy() as client:
        body = {**BODY, "min_tokens": 100}
        reply = await asyncio.wait_for(client.post(path, json=body), 30)
    assert reply.status_code == 400 and reply.json() == told
    assert servers.checked == [(f"d0{path}/render", body)]
    assert servers.hosts() == ["p0"] and servers.stopped == ["p0"]


@pytest.mark.parametrize("status", [200, 404, 500, None])
@pytest.mark.asyncio
async def test_a_check_that_finds_nothing_changes_nothing(status: int | None) -> None:
    """Servers of others need not have it."""

    def refuse() -> httpx.Response:
        if status is None:
            raise httpx.ReadError("gone")
        return json_reply(status, {"error": "x"})

    servers = Servers(refusal=refuse)
    async with servers.proxy() as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"text": "from d0"}
    assert servers.hosts() == ["p0", "d0"]


@pytest.mark.asyncio
async def test_bodies_may_be_compressed_and_have_a_limit() -> None:
    """As those of the servers behind it."""
    servers = Servers()
    large = {**BODY, "prompt": "x" * 2000}
    gzipped = {"content-encoding": "gzip"}
    async with servers.proxy(max_request_body_size=1000) as client:

        async def post(value: Any, headers: dict[str, str] | None = None) -> httpx.Response:
            content = json.dumps(value).encode()
            content = gzip.compress(content) if headers == gzipped else content
            return await client.post("/v1/completions", content=content, headers=headers)

        assert (await post(BODY, gzipped)).json() == {"text": "from d0"}
        assert servers.seen[-1][1] == {**BODY, "kv_transfer_params": STATE}
        for headers in (None, gzipped):
            reply = await post(large, headers)
            assert reply.status_code == 413 and "--max-request-body-size" in reply.text
        reply = await post(BODY, {"content-encoding": "br"})
        assert reply.status_code == 415 and "as gzip or plain" in reply.json()["error"]["message"]
        broken = {"content": b"{}", "headers": gzipped}
        reply = await client.post("/v1/completions", **broken)  # type: ignore[arg-type]
        assert reply.status_code == 400 and "not valid gzip" in reply.json()["error"]["message"]
    assert len(servers.seen) == 2


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/responses"), ("GET", "/v1/completions"), ("GET", "/"), ("DELETE", "/v1/models")],
)
@pytest.mark.asyncio
async def test_other_routes_are_errors_that_say_where_to_go(method: str, path: str) -> None:
    async with Servers().proxy() as client:
        reply = await client.request(method, path)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (404, 404, "NotFoundError")
        assert error["message"].startswith(f"the proxy has no {method} {path}, only POST /v1/comp")
        assert (await client.head("/health")).status_code == 200


@pytest.mark.parametrize("host", ["p0", "d0"])
@pytest.mark.asyncio
async def test_headers_of_a_reply_that_are_for_the_client(host: str) -> None:
    headers = {"retry-after": "7", "x-request-id": "r", "connection": "close", "server": host}
    status = 401 if host == "p0" else 503

    def reply() -> httpx.Response:
        return httpx.Response(status, content=pieces_of(b"{}"), headers=headers)

    servers = Servers(replies={host: reply}, down={"d1"})
    async with servers.proxy() as client:
        got = await client.post("/v1/completions", json=BODY)
    assert got.status_code == status
    kept = {name: value for name, value in got.headers.items() if name in headers}
    assert kept == {"retry-after": "7", "x-request-id": "r"}


@pytest.mark.asyncio
async def test_streams_go_on_as_they_come() -> None:
    pieces = [b"data: 1\n\n", b"data: [DONE]\n\n"]

    def reply() -> httpx.Response:
        return httpx.Response(
            200,
            content=pieces_of(*pieces),
            headers={"content-type": "text/event-stream; charset=utf-8"},
        )

    servers = Servers(replies={"d0": reply})
    async with servers.proxy() as client:
        got = await client.post("/v1/completions", json={**BODY, "stream": True})
        assert got.content == b"".join(pieces)
        assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
        shown = (await client.get("/health")).json()
        assert [one["running"] for one in shown["decode"]] == [0, 0]


@pytest.mark.parametrize("host", ["p0", "d0"])
@pytest.mark.asyncio
async def test_a_client_that_leaves_ends_its_request(host: str) -> None:
    servers = Servers(hanging={host})
    app = build_app(
        ProxyArgs(prefill=["http://p0"], decode=["http://d0"]),
        httpx.MockTransport(servers.handle),
    )
    body = json.dumps(BODY).encode()

    async def receive() -> dict[str, Any]:
        if not servers.hosts() and not read:
            read.append(1)
            return {"type": "http.request", "body": body, "more_body": False}
        while host not in servers.hosts():
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    read: list[int] = []
    sent: list[dict[str, Any]] = []
    async with app.router.lifespan_context(app):
        await asyncio.wait_for(app(POST, receive, send), 60)  # type: ignore[arg-type]
    assert servers.stopped == [host]


def test_connections_are_those_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that a server understands can be given the proxy's address instead."""
    started: list[uvicorn.Config] = []
    monkeypatch.setattr(ProxyServer, "run", lambda server: started.append(server.config))
    argv = ["--prefill", "http://a", "--decode", "http://b", "--port", "8123"]
    assert main(["proxy", *argv]) == 0
    (config,) = started
    assert config.http is StreamingProtocol and config.port == 8123


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prefill", "http://a"], "--decode needs at least one URL"),
        (["--prefill", "a:1", "--decode", "http://b"], "--prefill a:1: a URL begins with"),
        (
            ["--prefill", "http://a", "--decode", "http://b", "--health-interval", "0"],
            "--health-interval must be",
        ),
        (["--prefill", "http://a", "--decode", "http://b", "--port", "99999"], "--port"),
    ],
)
def test_flags_are_checked(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["proxy", *argv]) == 1
    assert message in capsys.readouterr().err
