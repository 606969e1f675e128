# SPDX-License-Identifier: Apache-2.0
"""Python calls between OLMo 3's tags."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.tool_parsers.splitting import CUTS, pieces, streamed, whole
from tests.tool_parsers.test_pythonic import MESSY_PYTHON
from vllm.tool_parsers import CallDelta, ToolParser, tool_parsers


def olmo3() -> ToolParser:
    return tool_parsers.get("olmo3")({})


def test_content_and_calls() -> None:
    calls = 'weather(city="Köln </function_calls>", days=[1, null])\nnext()'
    expected = [
        ("weather", '{"city": "Köln </function_calls>", "days": [1, null]}'),
        ("next", "{}"),
    ]
    for text in (calls, f"\n{calls}\n", calls.replace(")\n", ")  \n\n ")):
        reply = f"I look.\n<function_calls>{text}</function_calls>Then"
        assert whole(olmo3, reply) == ("I look.\nThen", expected)


@pytest.mark.parametrize(
    "text",
    [
        "1 < 2 [f(a=1)] <func",
        "</function_calls>",
        "<function_calls>",
        "<function_calls></function_calls>",
        "<function_calls>none</function_calls> after",
        "<function_calls>[f(a=1)]</function_calls>",
        '<function_calls>{"name": "f"}</function_calls>',
        "<function_calls>f(a=1",
        "<function_calls>f(a=1</function_calls>",
        "<function_calls>f(a=1) and so on</function_calls>",
        "<function_calls>f() g()</function_calls>",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert whole(olmo3, text) == streamed(olmo3, list(text)) == (text, [])


def test_calls_that_end_badly() -> None:
    begin = "<function_calls>f(a=1)"
    one = [("f", '{"a": 1}')]
    for end in ("", "\n", "</func", "\n</function_calls>"):
        assert whole(olmo3, begin + end) == streamed(olmo3, list(begin + end)) == ("", one)
    text = begin + "\nand so on</function_calls>"
    assert whole(olmo3, text) == ("and so on</function_calls>", one)


def test_a_cut_call_is_content_at_the_end() -> None:
    delta = olmo3().end("<function_calls>f(a=1)\ng(b='so")
    assert (delta.content, [call.name for call in delta.calls]) == ("g(b='so", ["f"])


def test_a_call_goes_out_whole() -> None:
    parser = olmo3()
    assert parser.feed('Hi <function_calls>f(a="x').content == "Hi"
    assert parser.feed('")\n').calls == ()
    assert parser.feed("g").calls == (CallDelta(0, "f", '{"a": "x"}'),)
    assert parser.feed("()</function_calls>").calls == (CallDelta(1, "g", "{}"),)


@settings(max_examples=300, deadline=None)
@given(MESSY_PYTHON, CUTS)
def test_streaming_equals_parsing_at_once(text: str, cuts: list[int]) -> None:
    text = "<function_calls>" + text
    expected = whole(olmo3, text)
    assert streamed(olmo3, pieces(text, cuts)) == expected
    assert streamed(olmo3, list(text)) == expected
