# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses`: translation both ways, the order of its events, and the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pydantic
import pytest
import pytest_asyncio
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from tests.entrypoints.conftest import MakeClient
from tests.entrypoints.fake_engine import FakeAsyncLLM
from tests.entrypoints.scripted_engine import FULL, PARSERS, ScriptedEngine
from tests.entrypoints.server_events import Events, in_process, named_events
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.translate import encode_reasoning, to_chat
from vllm.exceptions import VLLMValidationError

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}

MakeApi = Callable[..., openai.AsyncOpenAI]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest_asyncio.fixture
async def make_api(engine: ScriptedEngine) -> AsyncIterator[MakeApi]:
    """Makes official clients of servers with the given `FrontEndArgs`."""
    clients = []

    def make(**args: Any) -> openai.AsyncOpenAI:
        clients.append(
            openai.AsyncOpenAI(
                api_key="k",
                base_url="http://server/v1",
                http_client=in_process(engine, **args),
                max_retries=0,
            )
        )
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


def chat_of(**body: Any) -> Any:
    return to_chat(ResponsesRequest.model_validate({"input": "hi", **body}))


def refusal_of(**body: Any) -> VLLMValidationError:
    with pytest.raises(VLLMValidationError) as refused:
        chat_of(**body)
    return refused.value


def same(item: dict[str, Any]) -> dict[str, Any]:
    """An output item without its random ids."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


# --- request to chat request ---------------------------------------------------------------------


def test_a_conversation_of_items_is_a_conversation_of_messages() -> None:
    part = {"type": "input_text", "text": "and?"}
    chat = chat_of(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "In English."}]},
            {"role": "user", "content": "weather?"},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [
                {"type": "reasoning_text", "text": "I look."}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
                {"type": "output_text", "text": "Let me see.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "w", "arguments": '{"city": "A"}'},
            {"type": "function_call", "call_id": "c2", "name": "w", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "7"},
            {"type": "function_call_output", "call_id": "c2", "output": [part]},
            {"type": "message", "role": "user", "content": [part]},
        ],
    )  # fmt: skip
    call = {"type": "function", "function": {"name": "w", "arguments": {"city": "A"}}}
    assert chat.messages == [
        {"role": "system", "content": "Be brief.\n\nIn English."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "reasoning": "I look.",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "c1", **call},
                {"id": "c2", "type": "function", "function": {"name": "w", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "content": "and?"},
        {"role": "user", "content": [part]},
    ]


def test_what_follows_a_turn_begins_the_next_one() -> None:
    items = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
    assert chat_of(input=[*items, thought]).messages == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "reasoning": "t"},
    ]


def test_encrypted_reasoning_is_read_where_there_is_no_other() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning("größer")}
    assert chat_of(input=[item]).messages == [{"role": "assistant", "reasoning": "größer"}]


def test_fields_get_the_chat_apis_names() -> None:
    chat = chat_of(
        max_output_tokens=5,
        temperature=0.5,
        top_k=3,
        stop=["x"],
        cache_salt="s",
        user="u",
        stream=True,
        stream_options={"include_obfuscation": False},
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        tools=[TOOL],
        parallel_tool_calls=False,
        **THINKING,
    )
    assert (chat.max_tokens, chat.temperature, chat.top_k, chat.stop) == (5, 0.5, 3, ["x"])
    assert (chat.cache_salt, chat.user, chat.stream, chat.stream_options) == ("s", "u", True, None)
    assert chat.reasoning_effort == "low" and chat.chat_template_kwargs == {"enable_thinking": True}
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}},
    }
    function = {key: value for key, value in TOOL.items() if key != "type"}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.parallel_tool_calls is False and chat.tool_choice is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        (
            {"type": "function", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
            "required",
        ),
    ],
)
def test_tool_choice(choice: Any, expected: Any) -> None:
    chat = chat_of(tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=choice)
    names = [tool["function"]["name"] for tool in chat.tools]
    allowed = isinstance(choice, dict) and choice["type"] == "allowed_tools"
    assert chat.tool_choice == expected
    assert names == (["weather"] if allowed else ["weather", "other"])


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


@pytest.mark.parametrize(
    ("body", "parameter", "instead"),
    [
        ({"store": True}, "store", "store=false"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation"),
        ({"background": True}, "background", "stream=true"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "shorten"),
        ({"truncation": "auto"}, "truncation", "shorten"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"n": 2}, "n", "several times"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "/v1/chat/completions"),
        ({"kv_transfer_params": {}}, "kv_transfer_params", "/v1/chat/completions"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "instructions"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"include": ["everything"]}, "include", "reasoning.encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "run it in the client"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "name"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": ["weather"]}],
                },
            },
            "tool_choice.tools.0",
            "no tool",
        ),
        ({"input": []}, "input", "at least one"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "the item itself"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "function_call_output"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input.0.role", "developer"),
        ({"input": [{"role": "user"}]}, "input.0.content", "needs content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input.0.content.0",
            "only text",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input.0.arguments",
            "JSON",
        ),
        (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "input.0.call_id",
            "call_id",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-_"}]},
            "input.0.encrypted_content",
            "leave the item out",
        ),
    ],
)
def test_refusals_name_the_field_and_what_to_do_instead(
    body: dict[str, Any], parameter: str, instead: str
) -> None:
    refused = refusal_of(**body)
    assert refused.parameter == parameter and instead in refused.message


def test_every_field_that_the_client_knows_is_known_here() -> None:
    """The rest is about OpenAI's own accounts, tiers and tools."""
    known = set(ResponseCreateParamsStreaming.__annotations__)
    assert known - ResponsesRequest.model_fields.keys() == {
        *("access_programs", "background_options", "image", "max_tool_calls"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier"),
    }


@pytest.mark.parametrize(
    "body",
    [
        {"store": False},
        {"background": False, "truncation": "disabled", "service_tier": "auto"},
        {"text": {"verbosity": "medium", "format": {"type": "text"}}},
        {"include": ["file_search_call.results"], "n": 1, "metadata": {"a": "b"}},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(body: dict[str, Any]) -> None:
    assert chat_of(**body).messages == [{"role": "user", "content": "hi"}]


# --- over HTTP -----------------------------------------------------------------------------------


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
