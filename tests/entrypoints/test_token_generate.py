# SPDX-License-Identifier: Apache-2.0
"""`/inference/v1/generate`: what the render routes prepared, and scores, without text."""

from __future__ import annotations

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient, events
from tests.entrypoints.fake_engine import FakeAsyncLLM, byte_ids
from vllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.asyncio

HI = [{"role": "user", "content": "hi"}]


async def generate(client: httpx.AsyncClient, status: int = 200, **body: object) -> dict:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}, **body}
    reply = await client.post("/inference/v1/generate", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_rendered_request_generates_what_the_route_would(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, path: str
) -> None:
    body = {"max_tokens": 4, "seed": 3, "logit_bias": {"5": 1}, "kv_transfer_params": {"a": 1}}
    body["placement"] = "all-gdn"
    body |= {"messages": HI} if "chat" in path else {"prompt": "hi"}
    rendered = (await client.post(path + "/render", json=body)).json()
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    direct = (await client.post(path, json={**body, "return_token_ids": True})).json()
    reply = (await client.post("/inference/v1/generate", json=rendered)).json()
    assert reply["request_id"] == rendered["request_id"]
    assert reply["choices"][0]["token_ids"] == direct["choices"][0]["token_ids"]
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["kv_transfer_params"] == direct["kv_transfer_params"]
    first, second = engine.calls
    assert first.prompt["prompt_token_ids"] == second.prompt["prompt_token_ids"]
    assert first.params.logit_bias == second.params.logit_bias == {5: 1.0}
    assert first.params.placement == second.params.placement == "all-gdn"
    assert second.params.extra_args == first.params.extra_args and second.params.seed == 3
    assert not second.params.detokenize


async def test_stream(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 1}}
    options = {"include_usage": True}
    reply = await client.post(
        "/inference/v1/generate", json={**body, "stream": True, "stream_options": options}
    )
    *chunks, last = events(reply)
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert tokens == byte_ids("Grü")[:3] and len(chunks) == 3
    (entry,) = chunks[0]["choices"][0]["logprobs"]["content"]
    assert entry["token"] == f"token_id:{tokens[0]}" and entry["bytes"] is None
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert engine.calls[0].params.output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids.0"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"sampling_params": {"max_tokens": "many"}}, "sampling_params"),
        ({"sampling_params": {"max_tokens": 10**6}}, "max_tokens"),
        ({"features": {"image": "x"}}, "features"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": "nope"}, "model"),
    ],
)
async def test_bad_fields_are_named(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, fields: dict, param: str
) -> None:
    reply = await generate(client, 404 if param == "model" else 400, **fields)
    assert reply["error"]["param"] == param and not engine.calls


async def test_it_is_guarded_and_counts_as_generation(
    make_client: MakeClient, engine: FakeAsyncLLM
) -> None:
    await generate(make_client(api_key=["k"]), 401)
    engine.vllm_config.scheduler_config.max_num_seqs = 0
    await generate(make_client(max_queued_requests=0), 503)


async def test_prompts_are_scored_without_a_tokenizer(
    make_client: MakeClient, engine: FakeAsyncLLM
) -> None:
    engine.tokenizer = None
    body = {"prompt": [5, 6], "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = await make_client().post("/v1/completions", json=body)
    (choice,) = reply.json()["choices"]
    scores = choice["logprobs"]
    assert scores["tokens"] == ["token_id:5", "token_id:6"] and scores["text_offset"] == [0, 0]
    assert scores["token_logprobs"] == [None, -0.5] and choice["text"] == ""
