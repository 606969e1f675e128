# SPDX-License-Identifier: Apache-2.0
"""The schema of forced calls: what it lets through and what not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.tool_choice import ToolMode, call_list_schema, resolve_tool_choice
from vllm.v1.structured_output.json_schema import check_schema
from vllm.v1.structured_output.vocabulary import byte_vocabulary

xgrammar = pytest.importorskip("xgrammar")

STOP = 256
TOOLS: dict[str, dict[str, Any]] = {
    "day": {
        "type": "object",
        "properties": {"of": {"$ref": "#/$defs/Unit"}},
        "required": ["of"],
        "$defs": {"Unit": {"enum": ["week", "month"], "default": {"$ref": "#/kept"}}},
    },
    "tree": {
        "type": "object",
        "properties": {"leaves": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}},
}


def follows(schema: dict[str, Any], text: str) -> bool:
    grammar = xgrammar.GrammarCompiler(byte_vocabulary()).compile_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(STOP)


def call(name: str, parameters: str) -> str:
    return f'{{"name": "{name}", "parameters": {parameters}}}'


@pytest.mark.parametrize("parallel", [True, False])
def test_lists_of_calls(parallel: bool) -> None:
    schema = call_list_schema(TOOLS, parallel)
    check_schema(schema)
    week, now = call("day", '{"of": "week"}'), call("now", "{}")
    tree = call("tree", '{"leaves": [{"leaves": []}]}')
    for good in (week, now, tree):
        assert follows(schema, f"[{good}]")
    assert follows(schema, f"[{week}, {tree}]") is parallel
    for bad in (
        "[]",
        now,
        f"[{call('later', '{}')}]",
        f"[{call('day', '{}')}]",
        f"[{call('day', json.dumps({'of': 'year'}))}]",
        f"[{call('tree', json.dumps({'leaves': [1]}))}]",
    ):
        assert not follows(schema, bad)


def test_only_references_are_moved() -> None:
    schema = call_list_schema(TOOLS, True)["$defs"]
    assert schema["tool0"]["properties"]["of"] == {"$ref": "#/$defs/tool0/$defs/Unit"}
    assert schema["tool0"]["$defs"]["Unit"]["default"] == {"$ref": "#/kept"}
    assert schema["tool1"]["properties"]["leaves"]["items"] == {"$ref": "#/$defs/tool1"}
    assert TOOLS["tree"]["properties"]["leaves"]["items"] == {"$ref": "#"}


def test_names_that_are_keywords_are_names() -> None:
    size = {"type": "object", "properties": {"enum": {"$ref": "#/$defs/const"}}}
    tool = {
        "type": "object",
        "properties": {"default": {"$ref": "#/$defs/examples"}},
        "$defs": {"examples": size, "const": {"enum": ["s", "m"]}},
    }
    schema = call_list_schema({"f": tool}, True)
    check_schema(schema)
    assert follows(schema, f"[{call('f', json.dumps({'default': {'enum': 'm'}}))}]")
    assert not follows(schema, f"[{call('f', json.dumps({'default': {'enum': 'x'}}))}]")


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, ToolMode.NONE),
        ({"tool_choice": "auto"}, ToolMode.NONE),
        ({"tools": [], "tool_choice": "none"}, ToolMode.NONE),
        ({"tools": [{"function": {"name": "f"}}]}, ToolMode.AUTO),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "none"}, ToolMode.NONE),
    ],
)
def test_who_decides(fields: dict[str, Any], mode: ToolMode) -> None:
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], **fields)
    choice = resolve_tool_choice(request)
    assert choice.mode is mode and choice.constraint() is None
