# SPDX-License-Identifier: Apache-2.0
"""Keys, request ids, CORS, root path, extra middleware and the load counter."""

import asyncio

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.entrypoints.conftest import MakeClient
from tests.entrypoints.fake_engine import FakeAsyncLLM
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.asyncio


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_keys_guard_the_api_only(make_client: MakeClient) -> None:
    client = make_client(api_key=["one", "two"])
    for headers in ({}, bearer("three"), {"Authorization": "one"}, bearer("")):
        reply = await client.get("/v1/models", headers=headers)
        assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        error = reply.json()["error"]
        assert error["code"] == 401 and error["type"] == "AuthenticationError"
        assert "Authorization: Bearer KEY" in error["message"] and error["param"] is None
    for key in ("one", "two"):
        assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
    for path in ("/health", "/ping", "/version", "/metrics", "/load"):
        assert (await client.get(path)).status_code == 200
    assert (await client.get("/v2/anything")).status_code == 401
    assert (await client.post("/abort_requests", json={})).status_code == 401
    assert (await client.get("/v1beta")).status_code == 404


async def test_an_empty_key_means_no_authentication(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert (await make_client(api_key=[""]).get("/v1/models")).status_code == 200
    client = make_client()
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/v1/models", headers=bearer("secret"))).status_code == 200


async def test_keys_below_a_root_path(make_client: MakeClient) -> None:
    client = make_client(api_key=["one"], root_path="/proxy")
    assert (await client.get("/proxy/v1/models")).status_code == 401
    reply = await client.get("/proxy/v1/models", headers=bearer("one"))
    assert reply.status_code == 200


async def test_request_id_header(make_client: MakeClient) -> None:
    client = make_client(enable_request_id_headers=True)
    reply = await client.post(
        "/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": "mine"}
    )
    assert reply.headers["x-request-id"] == "mine" and reply.json()["id"] == "cmpl-mine"
    reply = await client.post("/v1/completions", json={"prompt": "hi"})
    assert reply.json()["id"] == "cmpl-" + reply.headers["x-request-id"]
    assert "x-request-id" not in (await make_client().get("/version")).headers


async def test_cors(make_client: MakeClient) -> None:
    headers = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    client = make_client(allowed_origins=["http://a"], api_key=["k"])
    reply = await client.options("/v1/completions", headers=headers)
    assert reply.headers["access-control-allow-origin"] == "http://a"
    reply = await client.options("/v1/completions", headers={**headers, "Origin": "http://b"})
    assert "access-control-allow-origin" not in reply.headers


class Stamp:
    """Test middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-stamp", b"yes"))
            await send(message)

        await self.app(scope, receive, stamped)


async def test_extra_middleware(make_client: MakeClient) -> None:
    client = make_client(middleware=[f"{__name__}.Stamp"])
    assert (await client.get("/version")).headers["x-stamp"] == "yes"
    with pytest.raises(VLLMValidationError, match="--middleware"):
        make_client(middleware=["no.such.Class"])


async def test_head_is_get_without_a_body(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    for path in ("/health", "/ping", "/v1/models", "/version", "/metrics"):
        reply = await client.head(path)
        assert reply.status_code == 200 and reply.content == b"", path
    length = (await client.head("/version")).headers["content-length"]
    assert length == (await client.get("/version")).headers["content-length"]
    assert (await client.head("/v1/completions")).status_code == 405
    engine.dead = True
    assert (await client.head("/health")).status_code == 503


async def test_load(make_client: MakeClient, engine: FakeAsyncLLM) -> None:
    client = make_client()
    engine.hang_after = 0
    waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
    while not engine.running:
        await asyncio.sleep(0.01)
    assert (await client.get("/load")).json() == {"server_load": 1}
    uncounted = make_client(enable_server_load_tracking=False)
    assert (await uncounted.get("/load")).json() == {"server_load": 0}
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await client.get("/load")).json() == {"server_load": 0}
