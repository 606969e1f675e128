# SPDX-License-Identifier: Apache-2.0
"""`/v1/messages`: its replies, the order of its events, its errors, and the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import httpx
import pydantic
import pytest
import pytest_asyncio

from tests.entrypoints.conftest import MakeClient
from tests.entrypoints.fake_engine import MAX_MODEL_LEN, FakeAsyncLLM
from tests.entrypoints.message_bodies import HI, THINK, TOOL
from tests.entrypoints.scripted_engine import FULL, PARSERS, ScriptedEngine
from tests.entrypoints.server_events import Events, in_process, named_events, official_clients

if TYPE_CHECKING:
    import anthropic

# The official client takes seconds to import: the tests that use it do that.
MakeApi = Callable[..., "anthropic.AsyncAnthropic"]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest_asyncio.fixture
async def make_api(engine: ScriptedEngine) -> AsyncIterator[MakeApi]:
    """Makes official clients of servers with the given `FrontEndArgs`."""
    import anthropic

    async with official_clients(anthropic.AsyncAnthropic, "http://server", engine) as make:
        yield make


async def stream_of(client: httpx.AsyncClient, **body: Any) -> Events:
    body = {"messages": HI, "max_tokens": 400, "stream": True, **body}
    return named_events(await client.post("/v1/messages", json=body))


@pytest.mark.asyncio
@pytest.mark.parametrize("piece", [1, 4, 1000])
async def test_order_and_indices_of_the_events(
    make_client: MakeClient, engine: ScriptedEngine, piece: int
) -> None:
    engine.script, engine.piece = FULL, piece
    events = await stream_of(make_client(**PARSERS), tools=[TOOL], thinking=THINK)
    steps = [
        (event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events
    ]
    once = [step for i, step in enumerate(steps) if i == 0 or steps[i - 1] != step]
    start, delta, stop = (f"content_block_{what}" for what in ("start", "delta", "stop"))
    assert once == [
        ("message_start", None, None),
        (start, 0, None),
        (delta, 0, "thinking_delta"),
        (delta, 0, "signature_delta"),
        (stop, 0, None),
        (start, 1, None),
        (delta, 1, "text_delta"),
        (stop, 1, None),
        (start, 2, None),
        (delta, 2, "input_json_delta"),
        (stop, 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    message, last = events[0]["message"], events[-2]
    assert message["id"].startswith("msg_") and message["content"] == []
    assert message["stop_reason"] is None and message["usage"]["output_tokens"] >= 1
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == len(FULL)
    assert last["usage"]["input_tokens"] == message["usage"]["input_tokens"]


@pytest.mark.asyncio
async def test_stream_and_reply_are_the_same_message(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script = FULL
    api = make_api(**PARSERS)
    body: Any = {"model": "fake", "max_tokens": 400, "messages": HI, "tools": [TOOL]}
    whole = await api.messages.create(**body, thinking=THINK)
    async with api.messages.stream(**body, thinking=THINK) as stream:
        streamed = await stream.get_final_message()
    thinking, said, call = whole.content
    assert (thinking.type, thinking.thinking) == ("thinking", "I think.")
    assert said.text == "Hm." and (call.name, call.input) == ("weather", {"city": "Köln"})
    assert call.id.startswith("toolu_") and whole.stop_reason == "tool_use"
    assert streamed.content[0] == thinking and streamed.content[1].text == "Hm."
    assert (streamed.content[2].name, streamed.content[2].input) == (call.name, call.input)
    assert (streamed.usage, streamed.stop_reason) == (whole.usage, whole.stop_reason)
    assert whole.usage.output_tokens_details.thinking_tokens == len("I think.")


@pytest.mark.asyncio
async def test_the_reply_is_a_valid_message(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = FULL
    api = make_api(**PARSERS)
    first = await api.messages.create(
        model="fake", max_tokens=400, messages=HI, tools=[TOOL], thinking=THINK
    )
    result: Any = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "7 °C"}
    history: Any = [*HI, first.to_param(), {"role": "user", "content": [result]}]
    engine.script = "Cold."
    body: Any = {"model": "fake", "messages": history, "tools": [TOOL], "system": "Brief."}
    second = await api.messages.create(**body, max_tokens=5)
    assert second.content[0].text == "Cold." and second.stop_reason == "end_turn"
    assert engine.calls[-1].prompt["prompt"] == (
        "[system]Brief.[user]hi[assistant]<think>I think.</think>Hm.(weather city=Köln)[tool]7 °C"
        "<weather>[assistant]"
    )
    count = await api.messages.count_tokens(**body)
    assert count.input_tokens == second.usage.input_tokens


@pytest.mark.asyncio
async def test_cached_tokens_are_counted_apart() -> None:
    client = in_process(FakeAsyncLLM())
    count = await client.post("/v1/messages/count_tokens", json={"messages": HI})
    reply = await client.post("/v1/messages", json={"messages": HI, "max_tokens": 2})
    usage = reply.json()["usage"]
    assert usage["cache_read_input_tokens"] == 4
    assert usage["input_tokens"] == count.json()["input_tokens"] - 4


@pytest.mark.asyncio
async def test_usage_counts_drafts() -> None:
    """In the reply and at the end of a stream; nothing is said where nothing was drafted."""
    client = in_process(FakeAsyncLLM())
    body = {"messages": HI, "max_tokens": 3, "vllm_xargs": {"drafted": [2, 5]}}
    drafts = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 5}
    whole = (await client.post("/v1/messages", json=body)).json()
    assert whole["usage"]["output_tokens_details"] == drafts
    *_, last, _ = named_events(await client.post("/v1/messages", json=body | {"stream": True}))
    assert last["usage"]["output_tokens_details"] == drafts
    plain = await client.post("/v1/messages", json={"messages": HI, "max_tokens": 3})
    assert plain.json()["usage"].get("output_tokens_details") is None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("max_tokens", "reason"),
    [(7, "max_tokens"), (10 * MAX_MODEL_LEN, "model_context_window_exceeded")],
)
async def test_more_tokens_than_the_context_holds_may_be_asked_for(
    make_api: MakeApi, engine: ScriptedEngine, max_tokens: int, reason: str
) -> None:
    engine.script, engine.finish_reason = "Half a", "length"
    reply = await make_api().messages.create(model="fake", messages=HI, max_tokens=max_tokens)
    assert reply.stop_reason == reason
    room = MAX_MODEL_LEN - reply.usage.input_tokens
    assert engine.calls[-1].params.max_tokens == min(max_tokens, room)


@pytest.mark.asyncio
@pytest.mark.parametrize(("max_tokens", "allowed"), [(200, None), (300, 44)])
async def test_reasoning_before_a_forced_call_leaves_it_some_of_the_tokens_asked_for(
    make_api: MakeApi, engine: ScriptedEngine, max_tokens: int, allowed: int | None
) -> None:
    """Not of those that the context has room for."""
    engine.script = '{"city": "Köln"}'
    choice: Any = {"type": "tool", "name": "weather"}
    await make_api(**PARSERS).messages.create(
        model="fake", messages=HI, max_tokens=max_tokens, tools=[TOOL], tool_choice=choice
    )
    params = engine.calls[-1].params
    assert params.max_tokens == max_tokens and params.structured_outputs is not None
    budget = params.structured_outputs.reasoning
    assert (budget and budget.max_tokens) == allowed


@pytest.mark.asyncio
async def test_streamed_arguments_are_an_object_even_when_cut(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    """A whole reply holds complete calls only; a stream has told of the call before it was cut."""
    engine.script = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "da'
    engine.finish_reason = "length"
    api = make_api(**PARSERS)
    body: Any = {"model": "fake", "max_tokens": 50, "messages": HI, "tools": [TOOL]}
    whole = await api.messages.create(**body)
    async with api.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in whole.content] == ["text"]
    assert streamed.content[0].input == {"city": "Köln"}
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"


@pytest.mark.asyncio
async def test_structured_output(make_api: MakeApi, engine: ScriptedEngine) -> None:
    class City(pydantic.BaseModel):
        name: str

    engine.script = '{"name": "Köln"}'
    parsed = await make_api().messages.parse(
        model="fake", max_tokens=50, messages=HI, output_format=City
    )
    assert parsed.parsed_output == City(name="Köln")
    constraint = engine.calls[-1].params.structured_outputs
    assert constraint is not None and "name" in constraint.json["properties"]


@pytest.mark.asyncio
async def test_errors_are_anthropics(make_api: MakeApi, engine: ScriptedEngine) -> None:
    import anthropic

    api = make_api()
    body: Any = {"model": "fake", "max_tokens": 5, "messages": HI}
    with pytest.raises(anthropic.BadRequestError) as bad:
        await api.messages.create(**body, extra_body={"temperature": 7})
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.body["error"]["message"].startswith("temperature")
    with pytest.raises(anthropic.NotFoundError) as missing:
        await api.messages.create(**{**body, "model": "claude"})
    assert missing.value.body["type"] == "error"
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await api.post("/v1/messages", body={"messages": HI}, cast_to=object)

    async def fail(*args: Any) -> AsyncIterator[Any]:
        async for output in ScriptedEngine._outputs(engine, *args):
            yield output
            raise RuntimeError("secret")

    engine.script = "Hello"
    engine._outputs = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(anthropic.APIStatusError) as failed:
        async for _ in await api.messages.create(**body, stream=True):
            pass
    assert failed.value.body["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(failed.value.body)


@pytest.mark.asyncio
async def test_refusals_before_the_route_are_anthropics_too(make_client: MakeClient) -> None:
    client = make_client(api_key=["k"], max_request_body_size=100)
    keyless = await client.post("/v1/messages", json={})
    assert keyless.status_code == 401
    assert keyless.json()["error"]["type"] == "authentication_error"
    headers = {"x-api-key": "k"}
    large = await client.post("/v1/messages", json={"system": "x" * 200}, headers=headers)
    assert large.json()["error"]["type"] == "request_too_large"
    batches = await client.post("/v1/messages/batches", json={}, headers=headers)
    assert batches.status_code == 501 and batches.json()["type"] == "error"
    other = await client.post("/v1/embeddings", json={}, headers=headers)
    assert other.status_code == 501 and "param" in other.json()["error"]


@pytest.mark.asyncio
async def test_the_clients_key_header_is_a_key(make_api: MakeApi, engine: ScriptedEngine) -> None:
    import anthropic

    engine.script = "Hello"
    body: Any = {"model": "fake", "max_tokens": 5, "messages": HI}
    assert (await make_api("secret", api_key=["secret"]).messages.create(**body)).content
    with pytest.raises(anthropic.AuthenticationError):
        await make_api("wrong", api_key=["secret"]).messages.create(**body)
