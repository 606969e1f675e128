# SPDX-License-Identifier: Apache-2.0
"""The small routes: health, models, decisions, metrics, tokenise, development."""

import re

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient
from tests.entrypoints.fake_engine import FakeAsyncLLM, byte_ids
from vllm import decisions
from vllm.entrypoints.openai.routes.unsupported import UNSUPPORTED
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


async def test_remote_tokenizers_find_special_tokens_where_a_tokenizer_config_has_them(
    make_client: MakeClient, engine: FakeAsyncLLM
) -> None:
    """lm-eval with `tokenizer_backend=remote` scores texts without context behind `eos_token`."""
    assert engine.tokenizer is not None
    client = make_client(enable_tokenizer_info_endpoint=True)
    info = (await client.get("/tokenizer_info")).json()
    special = engine.tokenizer.special_tokens_map
    assert special["eos_token"] and {key: info[key] for key in special} == special
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    found = (await client.post("/tokenize", json=asked)).json()["tokens"]
    assert found == [engine.tokenizer.eos_token_id]


async def test_optional_routes(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client()
    assert (await client.get("/server_info")).status_code == 404
    refused = await client.get("/tokenizer_info")
    assert refused.status_code == 501
    assert "--enable-tokenizer-info-endpoint" in refused.json()["error"]["message"]
    assert (await client.get("/openapi.json")).status_code == 200
    client = make_client(enable_tokenizer_info_endpoint=True, disable_fastapi_docs=True)
    assert "im_start" in (await client.get("/tokenizer_info")).json()["chat_template"]
    for path in ("/openapi.json", "/docs"):
        assert (await client.get(path)).status_code == 404
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    client = make_client()
    text = (await client.get("/server_info")).json()["vllm_config"]
    described = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
    assert "/models/fake" in text and described["model_config"]["model"] == "/models/fake"
    assert "hf_secret" not in text and described["model_config"]["hf_token"] == "***"
    assert (await client.get("/server_info?config_format=xml")).status_code == 400
    assert (await client.get("/get_world_size")).json() == {"world_size": 1}
    body = {"method": "place", "args": [1], "kwargs": {"a": 2}}
    reply = (await client.post("/collective_rpc", json=body)).json()
    assert reply["results"][0]["method"] == "place" and reply["results"][0]["args"] == [1]
    assert reply["results"][0]["kind"] == "<class 'int'>"
    reply = (await client.post("/collective_rpc", json={"method": "get_mixer_names"})).json()
    assert reply["results"] == [["gdn", "kda"]]
    assert (await client.post("/reset_prefix_cache")).status_code == 200


@pytest.mark.parametrize("path", list(UNSUPPORTED))
async def test_unsupported_routes_say_what_to_use(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, path: str
) -> None:
    for method in ("GET", "POST", "DELETE"):
        reply = await client.request(method, re.sub(r"{\w+}", "resp_1", path))
        error = reply.json()["error"]
        anthropic = path.startswith("/v1/messages")
        assert reply.status_code == 501 and error.get("code") == (None if anthropic else 501)
        assert error["type"] == ("api_error" if anthropic else "NotImplementedError")
        assert path in error["message"] and UNSUPPORTED[path] in error["message"]


async def test_what_the_official_client_may_ask_for_besides_text(client: httpx.AsyncClient) -> None:
    for path in ("files", "batches/b", "moderations", "images/edits", "chat/completions/c"):
        assert (await client.get(f"/v1/{path}")).status_code == 501
    assert (await client.get("/v1/no_such_route")).status_code == 404
    assert (await client.get("/v1/chat/completions")).status_code == 405


async def test_unsupported_routes_are_guarded_and_hidden(make_client: MakeClient) -> None:
    client = make_client(api_key=["k"])
    assert (await client.post("/v1/embeddings", json={})).status_code == 401
    assert "/v1/embeddings" not in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize(
    ("asked", "aborted"),
    [
        (["cmpl-a"], ["cmpl-a-0", "cmpl-a-1"]),
        ("chatcmpl-b", ["chatcmpl-b"]),
        (["cmpl-a-1", "tokens", "gone"], ["cmpl-a-1", "tokens"]),
        (["chatcmpl", "cmpl", "a"], []),
    ],
)
async def test_abort_by_reply_id(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, asked: object, aborted: list[str]
) -> None:
    engine.running = {"cmpl-a-0", "cmpl-a-1", "chatcmpl-b", "chatcmpl-b-2", "tokens"}
    reply = await client.post("/abort_requests", json={"request_ids": asked})
    assert reply.status_code == 200 and engine.aborted == aborted


async def test_abort_needs_ids(client: httpx.AsyncClient) -> None:
    for body in ({}, {"request_ids": None}, {"request_ids": [1]}):
        assert (await client.post("/abort_requests", json=body)).status_code == 400


def requests_counted(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line.startswith("http_requests_total{")]
    return {name: float(count) for name, count in (line.rsplit(" ", 1) for line in lines)}


async def test_http_metrics(client: httpx.AsyncClient) -> None:
    before = requests_counted((await client.get("/metrics")).text)
    for path in ("/v1/models/fake", "/v1/models/nope", "/nowhere/1", "/nowhere/2"):
        await client.get(path)
    text = (await client.get("/metrics")).text
    after = requests_counted(text)
    added = {name: count - before.get(name, 0) for name, count in after.items()}
    labels = 'handler="{}",method="{}",status="{}"'
    for expected, count in (
        (("/v1/models/{name:path}", "GET", 200), 1),
        (("/v1/models/{name:path}", "GET", 404), 1),
        (("none", "none", 404), 2),
    ):
        assert added[f"http_requests_total{{{labels.format(*expected)}}}"] == count
    assert 'http_request_duration_seconds_count{handler="/metrics",method="GET"}' in text


async def test_what_is_refused_before_its_route_is_counted_with_it(make_client: MakeClient) -> None:
    client = make_client(api_key=["k"])
    before = requests_counted((await client.get("/metrics")).text)
    for path in ("/v1/completions", "/v1/models/x", "/v1/nowhere"):
        assert (await client.post(path, json={})).status_code == 401
    after = requests_counted((await client.get("/metrics")).text)
    added = {name: count - before.get(name, 0) for name, count in after.items()}
    for labels, count in (
        ('handler="/v1/completions",method="POST",status="401"', 1),
        ('handler="none",method="none",status="401"', 2),
    ):
        assert added[f"http_requests_total{{{labels}}}"] == count


async def test_a_byte_order_mark_is_no_part_of_a_body(client: httpx.AsyncClient) -> None:
    body = '{"prompt": "hi", "max_tokens": 1}'.encode("utf-8-sig")
    headers = {"content-type": "application/json; charset=utf-8"}
    reply = await client.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == "G"
