# SPDX-License-Identifier: Apache-2.0
"""Streams: framing, chunks, usage, errors after the first byte; where tokens begin in a text."""

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient, events
from tests.entrypoints.fake_engine import FakeAsyncLLM
from tests.v1.engine.tokenizer_fixture import make_character_tokenizer
from vllm.entrypoints.openai.completion_stream import prompt_offsets
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

pytestmark = pytest.mark.asyncio

HI = [{"role": "user", "content": "hi"}]


async def stream(client: httpx.AsyncClient, **body: object) -> list[dict]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = await client.post(path, json={"stream": True, **body})
    assert reply.status_code == 200, reply.text
    return events(reply)


async def test_completion_chunks(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt="hi", max_tokens=9, return_token_ids=True)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "Grüße f"
    assert choices[0]["prompt_token_ids"] == [71, 72]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert sum(len(choice["token_ids"]) for choice in choices) == 9
    assert [choice["finish_reason"] for choice in choices] == [None] * 8 + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_stream_equals_reply(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["hi", "you"], "n": 2, "max_tokens": 9, "logprobs": 2, "echo": True}
    whole = (await client.post("/v1/completions", json=body)).json()
    texts = dict.fromkeys(range(4), "")
    tokens: dict[int, list[str]] = {index: [] for index in range(4)}
    offsets: dict[int, list[int]] = {index: [] for index in range(4)}
    for chunk in await stream(client, **body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert tokens[choice["index"]] == choice["logprobs"]["tokens"]
        assert offsets[choice["index"]] == choice["logprobs"]["text_offset"]


async def test_scored_prompt_only(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt="hi", max_tokens=0, echo=True, logprobs=1)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hi", ""]
    assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert chunks[1]["choices"][0]["finish_reason"] == "length"


async def test_chat_chunks(client: httpx.AsyncClient) -> None:
    chunks = await stream(
        client, messages=HI, max_tokens=3, return_token_ids=True, logprobs=True, top_logprobs=1
    )
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first, *rest = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(first["prompt_token_ids"]) > 2
    assert all("prompt_token_ids" not in chunk for chunk in rest)
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in rest) == "Gr"
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in rest] == [1, 1, 1]
    assert rest[0]["choices"][0]["logprobs"]["content"][0]["token"] == "G"
    assert rest[-1]["choices"][0]["finish_reason"] == "length"


async def test_every_choice_opens_with_its_role(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, messages=HI, max_tokens=2, n=3)
    opened = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert opened == [0, 1, 2]


async def test_echo_in_chat(client: httpx.AsyncClient) -> None:
    chunks = await stream(
        client,
        messages=[*HI, {"role": "assistant", "content": "yo"}],
        continue_final_message=True,
        add_generation_prompt=False,
        echo=True,
        max_tokens=2,
    )
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "yoGr"


@pytest.mark.parametrize("body", [{"prompt": "hi"}, {"messages": HI}])
async def test_usage(client: httpx.AsyncClient, body: dict) -> None:
    options = {"include_usage": True}
    body = {**body, "max_tokens": 3, "vllm_xargs": {"drafted": [2, 1]}}
    *chunks, last = await stream(client, **body, stream_options=options)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    drafts = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1}
    assert last["usage"]["completion_tokens_details"] == drafts
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert all("usage" not in chunk for chunk in chunks)
    options["continuous_usage_stats"] = True
    *chunks, last = await stream(client, **body, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[-3:] == [1, 2, 3] and last["usage"]["completion_tokens"] == 3


async def test_usage_forced_by_the_server(make_client: MakeClient) -> None:
    """At the end and in every chunk, as if every request asked for both."""
    client = make_client(enable_force_include_usage=True)
    for body in ({"prompt": "hi"}, {"messages": HI}):
        *chunks, last = await stream(client, **body, max_tokens=3)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[-3:] == [1, 2, 3] and last["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("body", [{"prompt": "hi"}, {"messages": HI}])
async def test_connector_reply_in_the_last_chunk(client: httpx.AsyncClient, body: dict) -> None:
    *chunks, last = await stream(client, **body, max_tokens=2, kv_transfer_params={"a": 1})
    assert last["kv_transfer_params"]["got"] == {"a": 1}
    assert all("kv_transfer_params" not in chunk for chunk in chunks)


@pytest.mark.parametrize("body", [{"prompt": ["a", "b"]}, {"messages": HI}])
async def test_failure_after_the_first_byte(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, body: dict
) -> None:
    engine.fail_after, engine.error = 2, EngineGenerateError("out of luck")
    *chunks, last = await stream(client, **body, max_tokens=5)
    assert chunks and "error" not in chunks[-1]
    assert last["error"]["message"] == "out of luck" and last["error"]["code"] == 500
    assert not engine.running


async def test_failure_before_the_first_byte_has_its_status(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    engine.fail_after = 0
    reply = await client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "InternalServerError"


async def test_a_conflict_in_the_request_is_the_clients_error(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    """Found while generating: status 400 as long as nothing was sent, an error event later."""
    engine.error = VLLMValidationError("no token may follow in the grammar")
    body = {"prompt": "hi", "max_tokens": 5}
    engine.fail_after = 0
    for streamed in (False, True):
        reply = await client.post("/v1/completions", json={**body, "stream": streamed})
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "BadRequestError"
    engine.fail_after = 2
    *chunks, last = await stream(client, **body)
    assert len(chunks) == 2
    assert last["error"]["code"] == 400 and "no token may follow" in last["error"]["message"]


async def test_connector_parameters_end_each_choice(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1, "kv_transfer_params": {"x": 1}}
    chunks = await stream(client, **body)
    given = {chunk["choices"][0]["index"]: chunk["kv_transfer_params"]["path"] for chunk in chunks}
    assert given == {0: "/0", 1: "/1", 2: "/0", 3: "/1"}


async def test_offsets_behind_a_token_that_is_not_shown() -> None:
    """Where the first word of a text is shown without its space."""
    tokenizer = make_character_tokenizer()
    ids = tokenizer.encode("the the")
    assert len(ids) == 2
    first = tokenizer.unk_token_id
    assert prompt_offsets(tokenizer, [first, *ids], "the the") == [0, 0, 3]
    assert prompt_offsets(tokenizer, [first, *ids], "<unk> the the") == [0, 5, 9]
