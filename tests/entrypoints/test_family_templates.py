# SPDX-License-Identifier: Apache-2.0
"""Conversations reach every family's chat template as transformers passes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.entrypoints.family_templates import FAMILY_SHAPES, SHAPES, Shape
from tests.entrypoints.scripted_engine import ScriptedEngine
from tests.entrypoints.server_events import in_process
from tests.tiny_configs import FAMILIES

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Ask.", "parameters": SCHEMA}}
    for name in ("weather", "traffic")
]
#: nine letters and digits, as Mistral's templates demand
CALL_ID = "abcDEF123"
ARGUMENTS = {"city": "Köln <1>", "days": 3}
REASONING = "They want numbers."


def conversation(shape: Shape, as_transformers: bool) -> list[dict[str, Any]]:
    """As a client of the API sends it, or as a user of transformers passes it to the template."""
    hello = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": " And now? "},
    ]
    if not shape.tools:
        return [{"role": "system", "content": "Be brief."}, *hello]
    arguments: Any = ARGUMENTS
    # Where a template concatenates arguments, users of transformers pass them as text, too.
    if not as_transformers or shape is SHAPES["deepseek"]:
        arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    function = {"name": "weather", "arguments": arguments}
    call: dict[str, Any] = {"role": "assistant", "content": "" if as_transformers else None}
    call |= {"tool_calls": [{"id": CALL_ID, "type": "function", "function": function}]}
    if shape.reasoning:
        call[shape.reasoning if as_transformers else "reasoning"] = REASONING
    result = {"role": "tool", "tool_call_id": CALL_ID, "content": "7 °C"}
    return [*hello, call, result]


async def server_prompt(
    shape: Shape, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]
) -> tuple[str, list[int]]:
    """Text and token ids of the prompt that a chat request makes."""
    engine = ScriptedEngine()
    engine.model_config.max_model_len = 8192
    assert engine.tokenizer is not None
    engine.tokenizer.chat_template = shape.template
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": 1,
        "chat_template_kwargs": variables,
    }
    if tools:
        body |= {"tools": tools, "tool_choice": "none"}
    reply = await in_process(engine).post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    prompt = engine.calls[-1].prompt
    return prompt["prompt"], prompt["prompt_token_ids"]


def test_every_family_has_a_shape() -> None:
    assert set(FAMILY_SHAPES) == set(FAMILIES), (
        "say in FAMILY_SHAPES of tests/entrypoints/family_templates.py which shape the family's "
        "chat template has"
    )
    assert set(FAMILY_SHAPES.values()) == set(SHAPES)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", SHAPES)
async def test_prompts_are_those_of_transformers(name: str) -> None:
    shape = SHAPES[name]
    tokenizer = ScriptedEngine().tokenizer
    assert tokenizer is not None
    tokenizer.chat_template = shape.template
    tools = TOOLS if shape.tools else None
    prompts = []
    for variables in [{}, dict(shape.variables)]:
        expected: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, **variables}
        messages = conversation(shape, as_transformers=True)
        text = tokenizer.apply_chat_template(messages, tokenize=False, **expected)
        encoded: Any = tokenizer.apply_chat_template(messages, **expected)
        ids = encoded["input_ids"]
        sent = conversation(shape, as_transformers=False)
        assert await server_prompt(shape, sent, tools, variables) == (text, ids)
        prompts.append(text)
    shown = ["And now?"]
    shown += ["weather", "traffic", "Köln", "7 °C"] if shape.tools else []
    shown += [REASONING] if shape.reasoning else []
    assert all(part in prompts[0] for part in shown)
    assert (prompts[0] != prompts[1]) == bool(shape.variables)


@pytest.mark.asyncio
async def test_harmony_has_room_for_one_text_beside_a_call() -> None:
    """A reply of gpt-oss may have both; as history it must not be an error."""
    shape = SHAPES["harmony"]
    messages = conversation(shape, as_transformers=False)
    messages[-2]["content"] = "I look."
    text, _ = await server_prompt(shape, messages, TOOLS, {})
    assert "<|channel|>analysis<|message|>I look.<|end|>" in text and REASONING not in text


@pytest.mark.asyncio
async def test_olmo_reads_tools_of_a_message() -> None:
    shape = SHAPES["olmo3"]
    messages = [
        {"role": "system", "content": "You help.", "functions": '[{"name": "weather"}]'},
        {"role": "user", "content": "Hi"},
    ]
    tokenizer = ScriptedEngine().tokenizer
    assert tokenizer is not None
    expected = tokenizer.apply_chat_template(
        messages, chat_template=shape.template, add_generation_prompt=True, tokenize=False
    )
    text, _ = await server_prompt(shape, messages, None, {})
    assert text == expected and '<functions>[{"name": "weather"}]</functions>' in text


@pytest.mark.asyncio
@pytest.mark.parametrize("name", SHAPES)
async def test_a_developer_speaks_as_the_system(name: str) -> None:
    """Most templates know no such role and would leave the message out, or refuse it."""
    hi = {"role": "user", "content": "Hi"}
    system, developer = [
        (await server_prompt(SHAPES[name], [{"role": role, "content": "Be brief."}, hi], None, {}))
        for role in ("system", "developer")
    ]
    assert system == developer and "Be brief." in system[0]
