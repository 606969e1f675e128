# SPDX-License-Identifier: Apache-2.0
"""Reasoning over HTTP, with the official client: alone, and before calls and constrained text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.entrypoints.chat_tools import (
    CALLS,
    HERMES,
    HI,
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


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.mark.parametrize(
    ("script", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "\nhm\n", "\n\nyes"),
        ("<think>hm", "hm", None),
        ("yes", None, "yes"),
        ("<think></think>yes", None, "yes"),
    ],
)
async def test_reasoning(
    make_api: MakeApi,
    engine: ScriptedEngine,
    script: str,
    reasoning: str | None,
    content: str | None,
) -> None:
    engine.script = script
    api = make_api(reasoning_parser="qwen3")
    message = (await ask(api)).message
    assert (message.reasoning, message.content) == (reasoning, content)
    choices = await chunks_of(api)
    deltas = [choice.delta for choice in choices]
    assert "".join(d.content or "" for d in deltas) == (content or "")
    pieces = [(d.model_extra or {}).get("reasoning", "") for d in deltas]
    assert "".join(pieces) == (reasoning or "")
    hidden = (await ask(api, extra_body={"include_reasoning": False})).message
    assert (hidden.reasoning, hidden.content or None) == (None, content)


async def test_the_prompt_says_where_reasoning_begins(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script = "hm</think>yes"
    api = make_api(reasoning_parser="qwen3")
    for thinking, expected in ((True, ("hm", "yes")), (False, (None, engine.script))):
        body = {"chat_template_kwargs": {"enable_thinking": thinking}}
        message = (await ask(api, extra_body=body)).message
        assert (message.reasoning, message.content) == expected
    begun = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "<think>a"}]}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    message = (await ask(api, messages=begun, extra_body=body)).message
    assert (message.reasoning, message.content) == ("hm", "yes")


async def test_space_between_reasoning_and_a_constrained_answer_is_of_neither(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script = "<think>hm\n</think>\n\nyes\n"
    api = make_api(reasoning_parser="qwen3")
    body: dict[str, Any] = {"extra_body": {"structured_outputs": {"choice": ["yes\n", "no"]}}}
    for engine.piece in (1, 3, 1000):
        for request in (ask, ask_streaming):
            message = (await request(api, max_tokens=300, **body)).message
            assert message.content == "yes\n"
    engine.script = "\nyes"  # what has no reasoning before it is the constraint's alone
    body["extra_body"] |= {"chat_template_kwargs": {"enable_thinking": False}}
    assert (await ask(api, max_tokens=300, **body)).message.content == "\nyes"


async def test_reasoning_before_calls(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = f"<think>say <tool_call>?</think>\n\n{HERMES}"
    api = make_api(**auto("hermes", reasoning_parser="qwen3"))
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS)
        assert calls_of(choice) == CALLS and choice.finish_reason == "tool_calls"
        assert choice.message.content.strip() == "Let me see."


async def test_forced_calls_after_reasoning(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = 'hm</think>{"city": "Köln"}'
    api = make_api(reasoning_parser="deepseek_r1")
    choice = await ask(api, tools=TOOLS, tool_choice=NAMED)
    assert calls_of(choice) == [("weather", '{"city": "Köln"}')]
    assert choice.message.reasoning == "hm"
    constraint = engine.calls[-1].params.structured_outputs
    assert constraint is not None and constraint.json is None
    tag = json.loads(str(constraint.structural_tag))
    assert tag["format"]["elements"][-1] == {"type": "json_schema", "json_schema": WEATHER}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    await ask(api, tools=TOOLS, tool_choice=NAMED, extra_body=off)
    constraint = engine.calls[-1].params.structured_outputs
    assert constraint is not None and json.loads(str(constraint.json)) == WEATHER
