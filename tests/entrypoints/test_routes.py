# SPDX-License-Identifier: Apache-2.0
"""The small routes: health, models, decisions, metrics, tokenise, development."""

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient
from tests.entrypoints.fake_engine import FakeAsyncLLM, byte_ids
from vllm import decisions
from vllm.version import __version__

pytestmark = pytest.mark.asyncio


async def test_health_follows_the_engine(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    for reply in (await client.get("/health"), await client.post("/ping")):
        assert reply.status_code == 200 and reply.content == b""
    engine.dead = True
    for reply in (await client.get("/health"), await client.get("/ping")):
        assert reply.status_code == 503
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 500


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["fake", "alias"]
    model = listed["data"][0]
    assert model["root"] == "/models/fake" and model["max_model_len"] == 512
    assert model["owned_by"] == "vllm" and model["parent"] is None and model["permission"]
    assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
    assert (await client.get("/v1/models/nope")).status_code == 404


async def test_every_served_name_is_accepted(client: httpx.AsyncClient) -> None:
    for name in ("fake", "alias"):
        reply = await client.post("/v1/completions", json={"prompt": "a", "model": name})
        assert reply.json()["model"] == name


async def test_decisions(client: httpx.AsyncClient) -> None:
    decisions.record("test choice", "a", "because", "b")
    assert {
        "what": "test choice",
        "chosen": "a",
        "why": "because",
        "instead_of": "b",
    } in (await client.get("/decisions")).json()


async def test_metrics_are_prometheus_text(client: httpx.AsyncClient) -> None:
    reply = await client.get("/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    assert "# TYPE" in reply.text


async def test_tokenize_text(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hü", "return_token_strs": True}
    reply = (await client.post("/tokenize", json=body)).json()
    assert reply["tokens"] == byte_ids("hü") and reply["count"] == 3
    assert reply["max_model_len"] == 512 and reply["token_strs"][0] == "h"
    reply = (await client.post("/tokenize", json={"prompt": ""})).json()
    assert reply["tokens"] == [] and reply["token_strs"] is None


async def test_tokenize_conversation(client: httpx.AsyncClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "add_generation_prompt": False,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    text = (await client.post("/detokenize", json={"tokens": tokens})).json()
    assert text == {"prompt": "<|im_start|>user\nhi<|im_end|>\n[1 tools]"}


async def test_optional_routes(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client()
    for path in ("/tokenizer_info", "/server_info"):
        assert (await client.get(path)).status_code == 404
    assert (await client.get("/openapi.json")).status_code == 200
    client = make_client(enable_tokenizer_info_endpoint=True, disable_fastapi_docs=True)
    assert "im_start" in (await client.get("/tokenizer_info")).json()["chat_template"]
    for path in ("/openapi.json", "/docs"):
        assert (await client.get(path)).status_code == 404
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    client = make_client()
    assert "fake" in (await client.get("/server_info")).json()["vllm_config"]
    body = {"method": "place", "args": [1], "kwargs": {"a": 2}}
    reply = (await client.post("/collective_rpc", json=body)).json()
    assert reply["results"][0]["method"] == "place" and reply["results"][0]["args"] == [1]
    assert (await client.post("/reset_prefix_cache")).status_code == 200
