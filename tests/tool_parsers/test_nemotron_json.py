# SPDX-License-Identifier: Apache-2.0
"""JSON arrays of calls between tags."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tool_parsers.splitting import CUTS, pieces, streamed, whole
from tests.tool_parsers.test_hermes import ARGUMENTS, NAMES
from vllm.tool_parsers import CallDelta, ToolParser, tool_parsers


def nemotron() -> ToolParser:
    return tool_parsers.get("nemotron_json")({})


def calls_text(*calls: tuple[str, str]) -> str:
    listed = (f'{{"name": {json.dumps(name)}, "arguments": {text}}}' for name, text in calls)
    return f"<TOOLCALL>[{', '.join(listed)}]</TOOLCALL>"


def test_content_and_calls() -> None:
    first, second = '{"city": "Köln ]<b>"}', '{"list": [1, {"}": "]"}]}'
    text = f"I look.\n{calls_text(('weather', first), ('next', second))}\n"
    expected = ("I look.", [("weather", first), ("next", second)])
    assert whole(nemotron, text) == streamed(nemotron, list(text)) == expected
    again = calls_text(("f", "{}")) + "\n" + calls_text(("g", "{}"))
    assert whole(nemotron, again) == ("", [("f", "{}"), ("g", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        " a\n1 < 2 <TOOL",
        "</TOOLCALL>",
        "<TOOLCALL>",
        "<TOOLCALL> [ ",
        "<TOOLCALL>none</TOOLCALL> after",
        "<TOOLCALL>[]</TOOLCALL>",
        '<TOOLCALL>{"name": "f", "arguments": {}}</TOOLCALL>',
        '<TOOLCALL>[ {"arguments": {}}]</TOOLCALL>',
        '<TOOLCALL>[{"name": "f", "arguments": 3}]</TOOLCALL>',
        '<TOOLCALL>[{"name": "f"',
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert whole(nemotron, text) == streamed(nemotron, list(text)) == (text, [])


def test_calls_that_end_badly() -> None:
    begin = '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}'
    one = ("", [("f", '{"a": 1}')])
    for end in ("", "}", "},", "}]", "}]</TOOL", "}</TOOLCALL>", "},</TOOLCALL>"):
        assert whole(nemotron, begin + end) == streamed(nemotron, list(begin + end)) == one
    assert whole(nemotron, begin + "}]</TOOLCALL> and so") == ("and so", one[1])
    assert whole(nemotron, begin + "}, 7]</TOOLCALL>") == (", 7]</TOOLCALL>", one[1])


def test_a_cut_call_is_content_at_the_end() -> None:
    text = 'So: <TOOLCALL>[{"name": "f", "arguments": {"a": 1'
    assert nemotron().end(text).content == text


def test_pieces_go_out_at_once() -> None:
    parser = nemotron()
    assert parser.feed('Hi <TOOLCALL>[{"name": "f", "arguments"').content == "Hi"
    assert parser.feed(': {"a": "x').calls == (CallDelta(0, "f", '{"a": "x'),)
    assert parser.feed('"}}, {"name": "g"').calls == (CallDelta(0, None, '"}'),)
    assert parser.feed(',"arguments":{}').calls == (CallDelta(1, "g", "{}"),)


@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3), CUTS)
def test_any_calls_come_back_under_any_cut(calls: list[tuple[str, dict]], cuts: list[int]) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    text = "So: " + calls_text(*written)
    expected = ("So:", written)
    assert whole(nemotron, text) == streamed(nemotron, pieces(text, cuts)) == expected
