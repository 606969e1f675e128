# SPDX-License-Identifier: Apache-2.0
"""Tool calls over HTTP, with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.entrypoints.chat_tools import (
    CALLS,
    CODER,
    HERMES,
    HI,
    LIST,
    NAMED,
    TOOLS,
    WEATHER,
    ask,
    ask_streaming,
    auto,
    calls_of,
    chunks_of,
)
from tests.entrypoints.conftest import MakeApi
from tests.entrypoints.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.asyncio

LISTED = {"type": "array"}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.mark.parametrize(
    ("parser", "script", "choice", "content"),
    [
        ("hermes", HERMES, None, "Let me see."),
        ("hermes", HERMES, "auto", "Let me see."),
        ("qwen3_coder", CODER, "auto", None),
        ("hermes", LIST, "required", None),
    ],
)
async def test_calls_are_the_same_streamed_or_not(
    make_api: MakeApi,
    engine: ScriptedEngine,
    parser: str,
    script: str,
    choice: str | None,
    content: str | None,
) -> None:
    api = make_api(**auto(parser))
    engine.script = script
    body = {"tools": TOOLS} if choice is None else {"tools": TOOLS, "tool_choice": choice}
    whole = await ask(api, **body)
    assert (whole.message.content, calls_of(whole)) == (content, CALLS)
    assert whole.finish_reason == "tool_calls"
    ids = {call.id for call in whole.message.tool_calls}
    assert len(ids) == 2 and {call.type for call in whole.message.tool_calls} == {"function"}
    for engine.piece in (1, 3, 40, 1000):
        streamed = await ask_streaming(api, **body)
        assert (streamed.message.content or None, calls_of(streamed)) == (content, CALLS)
        assert streamed.finish_reason == "tool_calls"


async def test_chunks_of_calls(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = HERMES
    opening, *choices = await chunks_of(make_api(**auto("hermes")), tools=TOOLS)
    assert opening.delta.role == "assistant" and opening.delta.content == ""
    entries = [entry for choice in choices for entry in choice.delta.tool_calls or []]
    begun = [entry for entry in entries if entry.id]
    assert [(entry.index, entry.function.name) for entry in begun] == [(0, "weather"), (1, "now")]
    assert all(entry.type == "function" for entry in begun)
    rest = [entry for entry in entries if not entry.id]
    assert all(entry.type is None and entry.function.name is None for entry in rest)
    assert len(rest) > 10  # arguments come piece by piece
    assert all(choice.delta.model_dump(exclude_unset=True) for choice in choices[:-1])
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


async def test_required_calls_are_constrained(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = LIST
    api = make_api()  # needs no parser
    for parallel in (True, False):
        choice = await ask(api, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        assert calls_of(choice) == CALLS[: 2 if parallel else 1]
        constraint = engine.calls[-1].params.structured_outputs
        assert constraint is not None and isinstance(constraint.json, str)
        schema = json.loads(constraint.json)
        assert schema["type"] == "array" and schema["minItems"] == 1
        assert ("maxItems" in schema) is not parallel
        names = [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]]
        assert names == [["weather"], ["now"]]
        moved = schema["$defs"]["tool0"]
        assert moved["properties"]["days"] == {"$ref": "#/$defs/tool0/$defs/Days"}
        assert moved["required"] == ["city"]


async def test_named_calls_are_constrained(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = '{"city": "Köln"}'
    api = make_api()
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS, tool_choice=NAMED)
        assert calls_of(choice) == [("weather", engine.script)]
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        constraint = engine.calls[-1].params.structured_outputs
        assert constraint is not None and json.loads(str(constraint.json)) == WEATHER


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


async def test_only_allowed_tools_are_shown(make_api: MakeApi, engine: ScriptedEngine) -> None:
    api = make_api(**auto("hermes"))
    engine.script = HERMES
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS, tool_choice=allowing("now"))
        assert engine.calls[-1].prompt["prompt"] == "[user]hi<now>[assistant]"
        assert engine.calls[-1].params.structured_outputs is None
        assert choice.finish_reason == "tool_calls"
    engine.script = '[{"name": "now", "parameters": {}}]'
    choice = await ask(api, tools=TOOLS, tool_choice=allowing("now", mode="required"))
    assert calls_of(choice) == CALLS[1:]
    assert engine.calls[-1].prompt["prompt"] == "[user]hi<now>[assistant]"
    constraint = engine.calls[-1].params.structured_outputs
    assert constraint is not None and "weather" not in str(constraint.json)
    engine.script = "no"
    assert (await ask(api, tools=TOOLS, tool_choice=allowing())).message.content == "no"
    assert engine.calls[-1].prompt["prompt"] == "[user]hi[assistant]"


async def test_text_only(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = HERMES
    api = make_api(**auto("hermes"))
    for body in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        choice = await ask(api, **body)
        assert choice.message.content == HERMES and choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
    engine.script = "\nNo <tools> needed. "
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS)
        assert choice.message.content == engine.script and not choice.message.tool_calls
        assert choice.finish_reason == "stop"


async def test_only_one_call_without_parallel_calls(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script = HERMES
    for request in (ask, ask_streaming):
        choice = await request(make_api(**auto("hermes")), tools=TOOLS, parallel_tool_calls=False)
        assert calls_of(choice) == CALLS[:1]


async def test_choices_are_independent(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = ["just text" + " " * 200, HERMES]
    api = make_api(**auto("hermes"))
    body: dict[str, Any] = {"model": "fake", "messages": HI, "tools": TOOLS, "n": 2}
    reply = await api.chat.completions.create(**body)
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "tool_calls"]
    async with api.chat.completions.stream(**body) as stream:
        streamed = (await stream.get_final_completion()).choices
    assert calls_of(streamed[1]) == calls_of(reply.choices[1]) == CALLS
    assert streamed[0].message.content == reply.choices[0].message.content == engine.script[0]
    assert not calls_of(streamed[0])


async def test_tokens_of_text_kept_back(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = HERMES
    choices = await chunks_of(
        make_api(**auto("hermes")),
        tools=TOOLS,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    logprobs = [one for c in choices if c.logprobs for one in c.logprobs.content]
    assert len(logprobs) == len(HERMES)
    ids = [one for c in choices for one in (c.model_extra or {}).get("token_ids", [])]
    assert len(ids) == len(HERMES)


async def test_history_reaches_the_template(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = HERMES
    api = make_api(**auto("hermes", reasoning_parser="qwen3"))
    message = (await ask(api, tools=TOOLS)).message
    call_ids = [call.id for call in message.tool_calls]
    results = [{"role": "tool", "tool_call_id": i, "content": "rain"} for i in call_ids]
    earlier = {**message.to_dict(), "reasoning": "hm"}
    await ask(api, messages=[*HI, earlier, *results], tools=TOOLS)
    assert engine.calls[-1].prompt["prompt"] == (
        "[user]hi[assistant]<think>hm</think>Let me see.(weather city=Köln days=2)(now)"
        "[tool]rain[tool]rain<weather><now>[assistant]"
    )


async def test_tags_that_are_special_tokens_are_kept(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    api = make_api(**auto("hermes"))
    await ask(api, tools=TOOLS)
    assert engine.calls[-1].params.skip_special_tokens
    assert engine.tokenizer is not None
    engine.tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    api = make_api(**auto("hermes"))
    await ask(api, tools=TOOLS)
    assert not engine.calls[-1].params.skip_special_tokens
    await ask(api)
    assert engine.calls[-1].params.skip_special_tokens


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": TOOLS}, "tools", "--tool-call-parser .harmony, hermes, "),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools", "--enable-auto-tool-choice"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no tool 'x'; the tools are weather, now",
        ),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", '"none", "auto", "required"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "not supported"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "weather"}}},
            "tool_choice",
            "not supported",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowing("now", "x")},
            "tool_choice.allowed_tools.tools.1",
            "no tool 'x'",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowing("now", mode="none")},
            "tool_choice.allowed_tools.mode",
            '"auto" or "required"',
        ),
        ({"tools": TOOLS, "tool_choice": allowing(mode="required")}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.allowed_tools.tools",
            "list the allowed",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "tool_choice.allowed_tools",
            "an object",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", '"function"'),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.function.name", "two tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools.0.function.parameters",
            "JSON schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": LISTED}}]},
            "tools.0.function.parameters",
            "schema of an object",
        ),
        (
            {"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}},
            "response_format",
            "forced call",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    make_api: MakeApi, engine: ScriptedEngine, body: dict, param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as error:
        await make_api(tool_call_parser="hermes").chat.completions.create(
            model="fake", messages=HI, stream=stream, **body
        )
    assert error.value.param == param
    assert not engine.calls
