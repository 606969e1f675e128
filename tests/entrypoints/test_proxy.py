# SPDX-License-Identifier: Apache-2.0
"""`vllm proxy`: who gets which request, and what passes through it."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest
import uvicorn

from tests.entrypoints.proxied_servers import BODY, POST, STATE, Servers, json_reply, pieces_of
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.http_protocol import StreamingProtocol
from vllm.entrypoints.proxy.app import build_app
from vllm.entrypoints.proxy.args import ProxyArgs
from vllm.entrypoints.proxy.server import ProxyServer


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
