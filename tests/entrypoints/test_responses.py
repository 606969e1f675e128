# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` over HTTP: replies, the order of events, and the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pydantic
import pytest

from tests.entrypoints.conftest import MakeApi, MakeClient
from tests.entrypoints.fake_engine import FakeAsyncLLM
from tests.entrypoints.response_bodies import THINKING, TOOL
from tests.entrypoints.scripted_engine import FULL, PARSERS, ScriptedEngine
from tests.entrypoints.server_events import Events, in_process, named_events
from vllm.entrypoints.openai.responses.translate import encode_reasoning


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def same(item: dict[str, Any]) -> dict[str, Any]:
    """An output item without its random ids."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


@pytest.mark.asyncio
@pytest.mark.parametrize("piece", [1, 1000])
async def test_what_is_cut_behind_a_call_is_the_last_item_and_alone_incomplete(
    make_api: MakeApi, engine: ScriptedEngine, piece: int
) -> None:
    """Of a whole reply, too, and of a stream that comes in one piece."""
    call = '[{"name": "weather", "parameters": {"city": "Köln"}}'
    engine.script, engine.piece, engine.finish_reason = call + ', {"na', piece, "length"
    api = make_api(**PARSERS)
    body: Any = {"model": "fake", "input": "hi", "tools": [TOOL], "tool_choice": "required"}
    whole = await api.responses.create(**body)
    *_, last = [event async for event in await api.responses.create(stream=True, **body)]
    for response in (whole, last.response):
        first, second = response.output
        assert (first.type, first.status) == ("function_call", "completed")
        assert (second.type, second.status) == ("message", "incomplete")
        assert second.content[0].text == '{"na'


@pytest.mark.asyncio
async def test_the_chat_route_names_the_fields_of_this_one(make_client: MakeClient) -> None:
    client = make_client()
    for body, parameter in [
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"temperature": 7}, "temperature"),
        ({"tools": [TOOL]}, "tools"),
        ({"input": 5}, "input"),
    ]:
        reply = await client.post("/v1/responses", json={"input": "hi", **body})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == parameter, reply.text
    stored = await client.get("/v1/responses/resp_1")
    assert stored.status_code == 501 and "nothing is stored" in stored.text


async def stream_of(client: httpx.AsyncClient, **body: Any) -> Events:
    body = {"input": "hi", "stream": True, **body}
    return named_events(await client.post("/v1/responses", json=body))


@pytest.mark.asyncio
@pytest.mark.parametrize("piece", [1, 4, 1000])
async def test_order_indices_and_ids_of_the_events(
    make_client: MakeClient, engine: ScriptedEngine, piece: int
) -> None:
    engine.script, engine.piece = FULL, piece
    events = await stream_of(make_client(**PARSERS), tools=[TOOL], **THINKING)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    part = ["output_item.added", "content_part.added"]
    assert once == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *(*part, "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    created, last = events[0]["response"], events[-1]["response"]
    assert created["status"] == "in_progress" and created["output"] == []
    assert created["id"] == last["id"] and created["id"].startswith("resp_")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for index, item in enumerate(last["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", item["id"]) for event in mine} == {item["id"]}
        assert {event.get("content_index", 0) for event in mine} == {0}
        text = "".join(event.get("delta", "") for event in mine)
        assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    usage = last["usage"]
    assert usage["output_tokens"] == len(FULL)
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("I think.")}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.asyncio
async def test_stream_and_reply_are_the_same_response(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script = FULL
    api = make_api(**PARSERS)
    body: Any = {"model": "fake", "input": "hi", "tools": [TOOL], "extra_body": THINKING}
    whole = await api.responses.create(**body)
    async with api.responses.stream(**body) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    for one, other in zip(whole.output, streamed.output, strict=True):
        told = same(one.to_dict())
        assert {key: same(other.to_dict())[key] for key in told if key != "content"} == {
            key: value for key, value in told.items() if key != "content"
        }
    assert [item.type for item in streamed.output] == ["reasoning", "message", "function_call"]
    assert streamed.output_text == whole.output_text == "Hm."
    assert streamed.output[0].content[0].text == whole.output[0].content[0].text == "I think."
    assert streamed.output[2].parsed_arguments == {"city": "Köln"}
    assert json.loads(whole.output[2].arguments) == {"city": "Köln"}
    assert streamed.usage == whole.usage and whole.status == streamed.status == "completed"
    assert whole.store is False and whole.completed_at is not None


@pytest.mark.asyncio
async def test_usage_counts_drafts() -> None:
    """In the reply and at the end of a stream; nothing is said where nothing was drafted."""
    client = in_process(FakeAsyncLLM())
    body = {"input": "hi", "max_output_tokens": 3, "vllm_xargs": {"drafted": [2, 5]}}
    drafts = {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 5,
    }
    whole = (await client.post("/v1/responses", json=body)).json()
    assert whole["usage"]["output_tokens_details"] == drafts
    *_, last = named_events(await client.post("/v1/responses", json=body | {"stream": True}))
    assert last["response"]["usage"]["output_tokens_details"] == drafts
    plain = await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 3})
    assert plain.json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.asyncio
async def test_the_output_is_valid_input(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = FULL
    api = make_api(**PARSERS)
    first = await api.responses.create(
        model="fake", input="hi", tools=[TOOL], extra_body=THINKING,
        include=["reasoning.encrypted_content"],
    )  # fmt: skip
    assert first.output[0].encrypted_content == encode_reasoning("I think.")
    call = first.output[2]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "7 °C"}
    engine.script = "Cold."
    history: list[Any] = [{"role": "user", "content": "hi"}, *first.output, output]
    second = await api.responses.create(model="fake", input=history, tools=[TOOL])
    assert second.output_text == "Cold."
    assert engine.calls[-1].prompt["prompt"] == (
        "[user]hi[assistant]<think>I think.</think>Hm.(weather city=Köln)[tool]7 °C"
        "<weather>[assistant]"
    )
    count = await api.responses.input_tokens.count(model="fake", input=history, tools=[TOOL])
    assert count.input_tokens == second.usage.input_tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_cut_by_its_limit_is_incomplete(
    make_client: MakeClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script, engine.finish_reason = "Half a", "length"
    client = make_client()
    if stream:
        events = await stream_of(client, max_output_tokens=6)
        assert events[-1]["type"] == "response.incomplete"
        response = events[-1]["response"]
    else:
        body = {"input": "hi", "max_output_tokens": 6}
        response = (await client.post("/v1/responses", json=body)).json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert response["completed_at"] is None and response["max_output_tokens"] == 6


@pytest.mark.asyncio
async def test_a_reply_without_a_word_is_an_empty_message(
    make_client: MakeClient, engine: ScriptedEngine
) -> None:
    engine.script = "I think.</think>"
    events = await stream_of(make_client(**PARSERS), **THINKING)
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[1]["content"][0]["text"] == ""
    added = [event["item"]["type"] for event in events if "output_item.added" in event["type"]]
    assert added == ["reasoning", "message"]


@pytest.mark.asyncio
async def test_logprobs_are_those_of_the_text(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = "I think.</think>Hm."
    api = make_api(**PARSERS)
    body: Any = {
        "model": "fake",
        "input": "hi",
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "extra_body": THINKING,
    }
    whole = await api.responses.create(**body)
    async with api.responses.stream(**body) as stream:
        deltas = [event async for event in stream if event.type == "response.output_text.delta"]
        streamed = await stream.get_final_response()
    entries = whole.output[1].content[0].logprobs
    assert engine.tokenizer is not None
    assert [entry.token for entry in entries] == [engine.tokenizer.decode(ord(c)) for c in "Hm."]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert [entry.token for entry in entries] == [e.token for d in deltas for e in d.logprobs]
    assert streamed.output[1].content[0].logprobs == entries


@pytest.mark.asyncio
async def test_structured_output(make_api: MakeApi, engine: ScriptedEngine) -> None:
    class City(pydantic.BaseModel):
        name: str

    engine.script = '{"name": "Köln"}'
    parsed = await make_api().responses.parse(model="fake", input="hi", text_format=City)
    assert parsed.output_parsed == City(name="Köln")
    constraint = engine.calls[-1].params.structured_outputs
    assert constraint is not None and constraint.json["properties"]["name"]["type"] == "string"


@pytest.mark.asyncio
async def test_what_was_asked_is_repeated_whatever_numbers_it_holds(
    make_client: MakeClient, engine: ScriptedEngine
) -> None:
    engine.script = "Hello"
    tool = {"type": "function", "name": "f", "parameters": {"const": 10**30}}
    asked = {"tools": [tool], "tool_choice": "none", "metadata": {"a": "b"}}
    client = make_client()
    events = await stream_of(client, **asked)
    whole = (await client.post("/v1/responses", json={"input": "hi", **asked})).json()
    for response in (events[0]["response"], events[-1]["response"], whole):
        assert {name: response[name] for name in asked} == asked


@pytest.mark.asyncio
async def test_a_forced_call_needs_no_parser(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = '{"city": "Köln"}'
    choice: Any = {"type": "function", "name": "weather"}
    # A format is about text, of which there is none.
    reply = await make_api().responses.create(
        model="fake",
        input="hi",
        tools=[TOOL],
        tool_choice=choice,
        text={"format": {"type": "json_object"}},
    )
    assert [item.type for item in reply.output] == ["function_call"]
    assert engine.calls[-1].params.structured_outputs is not None


@pytest.mark.asyncio
async def test_a_failure_in_the_stream_is_a_failed_response(
    make_client: MakeClient, engine: ScriptedEngine
) -> None:
    async def fail(*args: Any) -> AsyncIterator[Any]:
        async for output in ScriptedEngine._outputs(engine, *args):
            yield output
            raise RuntimeError("secret")

    engine.script = "Hello"
    engine._outputs = fail  # type: ignore[method-assign,assignment]
    events = await stream_of(make_client())
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(events)


@pytest.mark.asyncio
async def test_the_id_ends_the_request(make_client: MakeClient, engine: ScriptedEngine) -> None:
    engine.script, engine.finish_reason = "Hello", "abort"
    body = {"input": "hi", "request_id": "mine"}
    reply = await make_client().post("/v1/responses", json=body)
    assert engine.calls[0].request_id == "resp_mine"
    assert reply.status_code == 410 and "resp_mine" in reply.json()["error"]["message"]
