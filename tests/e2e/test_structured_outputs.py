# SPDX-License-Identifier: Apache-2.0
"""Structured outputs over HTTP, with the openai client and a trained (small) model."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.remote_server import RemoteServer

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-qwen3_5-code"
ASK: list = [{"role": "user", "content": "Describe a function that adds two numbers."}]
REGEX = r"def [a-z]{3,8}\((a|b), c\):"


class Argument(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["int", "float"]


class Function(BaseModel):
    name: str = Field(max_length=12)
    pure: bool
    lines: int = Field(ge=1, le=50)
    arguments: list[Argument] = Field(max_length=2)
    returns: Argument | None


SCHEMA_FORMAT: dict = {
    "type": "json_schema",
    "json_schema": {"name": "function", "schema": Function.model_json_schema()},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RemoteServer]:
    flags = ["--max-model-len", "1024", "--max-num-batched-tokens", "256", "--enforce-eager"]
    with RemoteServer(
        MODEL,
        *flags,
        "--max-num-seqs",
        "16",
        "--served-model-name",
        "tiny",
        "--structured-outputs-config",
        '{"disable_any_whitespace": true}',
        "--reasoning-parser",
        "qwen3",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RemoteServer) -> openai.OpenAI:
    return server.client()


def test_pydantic_parse(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="tiny", messages=ASK, response_format=Function, max_tokens=200, n=2, seed=1
    )
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Function)


def test_stream_equals_reply(client: openai.OpenAI) -> None:
    options: dict = {
        "model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 200,
        "response_format": SCHEMA_FORMAT,
    }  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0].message.content or ""
    pieces = client.chat.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert text == whole
    Function.model_validate_json(whole)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": REGEX}, REGEX),
        ({"choice": ["sum", "add two"]}, "sum|add two"),
        ({"grammar": 'root ::= "x" | "(" root ")"'}, r"\(*x\)*"),
        ({"json": {"enum": ["a", 1]}}, '"a"|1'),
    ],
)
def test_completions(client: openai.OpenAI, constraint: dict, pattern: str) -> None:
    reply = client.completions.create(
        model="tiny",
        prompt=["def add(", "import"],
        max_tokens=60,
        n=2,
        seed=5,
        logprobs=1,
        extra_body={"structured_outputs": constraint},
    )
    for choice in reply.choices:
        assert choice.finish_reason in ("stop", "length")
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.text)
    assert any(choice.finish_reason == "stop" for choice in reply.choices)


def test_structural_tag(client: openai.OpenAI) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<call>",
            "content": {"type": "json_schema", "json_schema": {"enum": [[1], {"a": 2}]}},
            "end": "</call>",
        },
    }
    reply = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=60, extra_body={"response_format": tag}
    )
    text = reply.choices[0].message.content or ""
    inner = re.fullmatch("<call>(.*)</call>", text)
    assert inner and json.loads(inner[1]) in ([1], {"a": 2})


def test_many_constraints_at_once(client: openai.OpenAI) -> None:
    def ask(i: int) -> str | None:
        schema = {"type": "object", "properties": {f"p{i % 6}": {"enum": [i, "x"]}},
                  "required": [f"p{i % 6}"]}  # fmt: skip
        constraint = {"structured_outputs": {"json": schema}} if i % 3 else {}
        reply = client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=40, seed=i, extra_body=constraint
        )
        return reply.choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, range(24)))
    for i, text in enumerate(texts):
        if i % 3:
            assert json.loads(text or "")[f"p{i % 6}"] in (i, "x")


def test_impossible_schema_is_the_clients_error(client: openai.OpenAI) -> None:
    schema = {"type": "integer", "minimum": 5, "maximum": 3}
    wanted: dict = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="minimum greater than maximum"):
        client.chat.completions.create(model="tiny", messages=ASK, response_format=wanted)


FLAGS: dict = {
    "type": "object",
    "properties": {"pure": {"type": "boolean"}},
    "required": ["pure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("max_tokens", [40, 300])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_comes_however_long_the_model_would_reason(
    client: openai.OpenAI, max_tokens: int, stream: bool
) -> None:
    """This model does not know how to stop reasoning."""
    tools: list = [{"type": "function", "function": {"name": "describe", "parameters": FLAGS}}]
    begun = [*ASK, {"role": "assistant", "content": "<think>Well"}]
    body: dict = {"model": "tiny", "messages": begun, "tools": tools, "max_tokens": max_tokens}
    body["parallel_tool_calls"] = False
    body["extra_body"] = {"continue_final_message": True, "add_generation_prompt": False}
    named = {"type": "function", "function": {"name": "describe"}}
    for choice in (named, "required") if max_tokens > 40 else (named,):
        if stream:
            with client.chat.completions.stream(**body, tool_choice=choice) as events:
                found = events.get_final_completion().choices[0]
        else:
            found = client.chat.completions.create(**body, tool_choice=choice).choices[0]
        (call,) = found.message.tool_calls or []
        assert call.function.name == "describe" and found.finish_reason == "tool_calls"
        assert set(json.loads(call.function.arguments)) == {"pure"}
        reasoning = (found.message.model_extra or {}).get("reasoning") or ""
        assert bool(reasoning) is (max_tokens > 40)
