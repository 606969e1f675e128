# SPDX-License-Identifier: Apache-2.0
"""Ids that a model writes for its calls: every protocol shows them, and so does the next prompt."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.entrypoints.scripted_engine import ScriptedEngine
from tests.entrypoints.server_events import in_process, named_events

KIMI = {"enable_auto_tool_choice": True, "tool_call_parser": "kimi_k2"}
CALL = '<|tool_call_begin|>{}<|tool_call_argument_begin|>{{"city": "Oslo"}}<|tool_call_end|>'
IDS = ["functions.weather:0", "functions.weather:1"]
SCRIPT = f"<|tool_calls_section_begin|>{''.join(map(CALL.format, IDS))}<|tool_calls_section_end|>"
#: as Kimi-K2's: a call and its result under the call's id
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}]"
    "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.id }}){% endfor %}{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PROMPT = f"[user]hi[assistant]({IDS[0]})({IDS[1]})[tool {IDS[0]}]7[tool {IDS[1]}]8"


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.script = SCRIPT
    assert engine.tokenizer is not None
    engine.tokenizer.chat_template = TEMPLATE
    return engine


def prompt_of(engine: ScriptedEngine) -> str:
    return str(engine.calls[-1].prompt["prompt"])


@pytest.mark.asyncio
async def test_chat(engine: ScriptedEngine) -> None:
    client = in_process(engine, **KIMI)
    tools = [{"type": "function", "function": FUNCTION}]
    body: dict[str, Any] = {"messages": HI, "tools": tools}
    reply = (await client.post("/v1/chat/completions", json=body)).json()
    message = reply["choices"][0]["message"]
    assert [call["id"] for call in message["tool_calls"]] == IDS
    streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["id"] for call in calls if "id" in call] == IDS
    results = [
        {"role": "tool", "tool_call_id": call, "content": text}
        for call, text in zip(IDS, "78", strict=True)
    ]
    body["messages"] = [*HI, message, *results]
    await client.post("/v1/chat/completions", json=body)
    assert prompt_of(engine) == PROMPT


@pytest.mark.asyncio
async def test_responses(engine: ScriptedEngine) -> None:
    client = in_process(engine, **KIMI)
    body: dict[str, Any] = {"input": HI, "tools": [{"type": "function", **FUNCTION}]}
    reply = (await client.post("/v1/responses", json=body)).json()
    assert [item["call_id"] for item in reply["output"]] == IDS
    assert not {item["id"] for item in reply["output"]} & set(IDS)
    events = named_events(await client.post("/v1/responses", json={**body, "stream": True}))
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    assert [item["call_id"] for item in added] == IDS
    results = [
        {"type": "function_call_output", "call_id": call, "output": text}
        for call, text in zip(IDS, "78", strict=True)
    ]
    body["input"] = [*HI, *reply["output"], *results]
    await client.post("/v1/responses", json=body)
    assert prompt_of(engine) == PROMPT


@pytest.mark.asyncio
async def test_messages(engine: ScriptedEngine) -> None:
    client = in_process(engine, **KIMI)
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": HI, "tools": tools}
    reply = (await client.post("/v1/messages", json=body)).json()
    assert [block["id"] for block in reply["content"]] == IDS
    events = named_events(await client.post("/v1/messages", json={**body, "stream": True}))
    started = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block["id"] for block in started] == IDS
    results = [
        {"type": "tool_result", "tool_use_id": call, "content": text}
        for call, text in zip(IDS, "78", strict=True)
    ]
    body["messages"] = [
        *HI,
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": results},
    ]
    await client.post("/v1/messages", json=body)
    assert prompt_of(engine) == PROMPT


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("choice", "script"),
    [
        ("auto", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'),
        ("required", '[{"name": "weather", "parameters": {"city": "Oslo"}}]'),
        ({"type": "function", "function": {"name": "weather"}}, '{"city": "Oslo"}'),
    ],
)
async def test_fresh_ids_are_of_the_form_that_mistrals_templates_take(
    engine: ScriptedEngine, choice: Any, script: str
) -> None:
    engine.script = script
    client = in_process(engine, enable_auto_tool_choice=True, tool_call_parser="mistral")
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": HI, "tools": tools, "tool_choice": choice}
    reply = (await client.post("/v1/chat/completions", json=body)).json()
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch("[a-zA-Z0-9]{9}", call["id"])
