# SPDX-License-Identifier: Apache-2.0
"""JSON calls that no tag announces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tool_parsers.splitting import CUTS, MESSY, pieces, streamed, whole
from tests.tool_parsers.test_hermes import ARGUMENTS, NAMES
from vllm.tool_parsers import CallDelta, ToolParser, tool_parsers

TAG = "<|python_tag|>"


def llama() -> ToolParser:
    return tool_parsers.get("llama3_json")({"f": {}, "g": {}})


def any_name() -> ToolParser:
    return tool_parsers.get("llama3_json")({})


def call(name: str, parameters: str) -> str:
    return f'{{"name": {json.dumps(name)}, "parameters": {parameters}}}'


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (call("f", '{"a": "}; <b>"}'), ""),
        (" \n" + call("f", '{"a": "}; <b>"}') + "\n", ""),
        (TAG + call("f", '{"a": "}; <b>"}'), ""),
        ("I look. " + TAG + "\n" + call("f", '{"a": "}; <b>"}'), "I look."),
        ('{"type": "function", "name": "f", "parameters": {"a": "}; <b>"}}', ""),
        ('{"parameters": {"a": "}; <b>"}, "name": "f"} and so', "and so"),
    ],
)
def test_one_call(text: str, content: str) -> None:
    expected = (content, [("f", '{"a": "}; <b>"}')])
    assert whole(llama, text) == streamed(llama, list(text)) == expected


@pytest.mark.parametrize("between", ["; ", ";\n", "\n", "", TAG, "; " + TAG])
def test_several_calls(between: str) -> None:
    text = call("f", "{}") + between + call("g", '{"b": [1]}') + ";"
    expected = ("", [("f", "{}"), ("g", '{"b": [1]}')])
    assert whole(llama, text) == streamed(llama, list(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", " \n", "Hello.", " {", "{}", TAG, TAG + " \n", "a <|python"),
        TAG + "import json\nprint({})",
        " " + call("no_tool", '{"a": 1}') + " after",
        '{"name": "Bob", "age": 3}',
        '{"answer": {"name": "f", "parameters": {}}}',
        '{"name": "f", "parameters": 3}',
        'So: {"name": "f", "parameters": {}}',
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert whole(llama, text) == streamed(llama, list(text)) == (text, [])


def test_what_follows_a_call() -> None:
    text = call("f", "{}") + "; " + call("no_tool", "{}")
    assert whole(llama, text) == ("; " + call("no_tool", "{}"), [("f", "{}")])
    assert streamed(llama, list(text)) == whole(llama, text)


def test_a_cut_call() -> None:
    text = '{"name": "f", "parameters": {"a": 1'
    assert streamed(llama, list(text)) == ("", [("f", '{"a": 1')])
    assert llama().end(text).content == text
    first = call("f", "{}") + ";"
    ended = llama().end(first + TAG + text)
    assert ended.calls == (CallDelta(0, "f", "{}"),)
    assert ended.content.endswith(TAG + text)


@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3), CUTS)
def test_calls_of_any_form(calls: list[tuple[str, dict[str, Any]]], cuts: list[int]) -> None:
    expected = ("", [(name, json.dumps(arguments)) for name, arguments in calls])
    text = "; ".join(call(*written) for written in expected[1])
    assert streamed(any_name, pieces(text, cuts)) == whole(any_name, text) == expected


@given(MESSY, CUTS)
def test_streaming_equals_parsing_at_once(text: str, cuts: list[int]) -> None:
    text = text.replace("<tool_call>", TAG).replace('"arguments"', '"parameters"')
    for make in (llama, any_name):
        assert streamed(make, pieces(text, cuts)) == whole(make, text)
        assert streamed(make, list(text)) == whole(make, text)
