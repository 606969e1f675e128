# SPDX-License-Identifier: Apache-2.0
"""Tool calls that end before they are complete: by the limit, or at a stop string."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.entrypoints.chat_tools import (
    CALLS,
    CODER,
    HERMES,
    LIST,
    NAMED,
    TOOLS,
    ask,
    ask_streaming,
    auto,
    calls_of,
    chunks_of,
)
from tests.entrypoints.conftest import MakeApi
from tests.entrypoints.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.asyncio

CUT_CALLS = [
    ("hermes", HERMES, "auto"),
    ("qwen3_coder", CODER, "auto"),
    ("hermes", LIST, "required"),
    ("hermes", '{"city": "Köln", "days": 2}', NAMED),
]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


async def test_what_a_second_call_would_be_is_left_out_although_it_is_cut(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    """As it is where the reply is streamed, or the call complete."""
    engine.script = HERMES[: HERMES.rindex("{}") + 1]
    api = make_api(**auto("hermes"))
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS, parallel_tool_calls=False)
        assert calls_of(choice) == CALLS[:1]
        assert "<tool_call>" not in (choice.message.content or "")


@pytest.mark.parametrize(("parser", "script", "choice"), CUT_CALLS)
async def test_a_call_cut_by_the_limit_is_content(
    make_api: MakeApi, engine: ScriptedEngine, parser: str, script: str, choice: Any
) -> None:
    """Wherever a reply ends, its calls are complete, and nothing the model wrote is lost."""
    api = make_api(**auto(parser))
    engine.finish_reason = "length"
    for end in range(1, len(script)):
        engine.script = script[:end]
        found = await ask(api, tools=TOOLS, tool_choice=choice)
        assert found.finish_reason == "length"
        calls = calls_of(found)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        if not calls:
            assert (found.message.content or "").strip() == script[:end].strip()
        elif len(calls) == 1 and choice != NAMED:
            assert (found.message.content or "").count("weather") == 0


@pytest.mark.parametrize(("parser", "script", "choice"), CUT_CALLS)
async def test_a_stop_string_within_a_call_is_the_reason_of_the_end(
    make_api: MakeApi, engine: ScriptedEngine, parser: str, script: str, choice: Any
) -> None:
    """Streamed or not, wherever it cuts: `tool_calls` is the reason of a reply with whole calls."""
    api = make_api(**auto(parser))
    engine.piece = 7
    reasons = set()
    for end in range(len(script), 0, -5):
        engine.script = script[:end]
        whole = await ask(api, tools=TOOLS, tool_choice=choice)
        streamed = await ask_streaming(api, tools=TOOLS, tool_choice=choice)
        expected = "tool_calls" if whole.message.tool_calls else "stop"
        assert whole.finish_reason == streamed.finish_reason == expected, script[:end]
        reasons.add(expected)
    assert reasons == {"stop", "tool_calls"}


async def test_a_stream_has_sent_the_call_that_is_cut(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script, engine.finish_reason = HERMES[: HERMES.index("ln")], "length"
    choices = await chunks_of(make_api(**auto("hermes")), tools=TOOLS)
    entries = [entry for choice in choices for entry in choice.delta.tool_calls or []]
    assert "".join(entry.function.arguments for entry in entries) == '{"city": "Kö'
    assert choices[-1].finish_reason == "length"
    engine.piece = 1000  # all of it in one piece
    choices = await chunks_of(make_api(**auto("hermes")), tools=TOOLS)
    assert not any(choice.delta.tool_calls for choice in choices)
    assert "".join(choice.delta.content or "" for choice in choices) == engine.script


@pytest.mark.parametrize("choice", [NAMED, "required"])
@pytest.mark.parametrize(
    ("script", "reasoning", "content"),
    [
        ("<thin", None, "<thin"),
        ("<think>hm", "hm", None),
        ('<think>hm</think>\n{"ci', "hm", '{"ci'),
        ("<think>hm</think>\n\n", "hm", "\n\n"),
    ],
)
async def test_a_forced_call_that_does_not_come(
    make_api: MakeApi,
    engine: ScriptedEngine,
    choice: Any,
    script: str,
    reasoning: str | None,
    content: str | None,
) -> None:
    engine.script, engine.finish_reason = script, "length"
    api = make_api(reasoning_parser="qwen3")
    found = await ask(api, tools=TOOLS, tool_choice=choice)
    assert not found.message.tool_calls and found.finish_reason == "length"
    assert found.message.reasoning == reasoning
    assert (found.message.content or "").strip() == (content or "").strip()
