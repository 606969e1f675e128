# SPDX-License-Identifier: Apache-2.0
"""Calls behind Mistral's tag, in both of its forms."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tool_parsers.splitting import CUTS, pieces, streamed, whole
from tests.tool_parsers.test_hermes import ARGUMENTS
from vllm.tool_parsers import CallDelta, ToolParser, tool_parsers

CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
FIRST, SECOND = '{"city": "Köln ]<b> [ARGS]"}', '{"list": [1, {"}": "]"}]}'


def mistral() -> ToolParser:
    return tool_parsers.get("mistral")({})


def array(*calls: tuple[str, str]) -> str:
    listed = (f'{{"name": {json.dumps(name)}, "arguments": {text}}}' for name, text in calls)
    return f"{CALLS}[{', '.join(listed)}]"


def one_by_one(*calls: tuple[str, str]) -> str:
    return "".join(f"{CALLS}{name}{ARGS}{text}" for name, text in calls)


@pytest.mark.parametrize("form", [array, one_by_one])
def test_content_and_calls(form: Callable[..., str]) -> None:
    calls = [("weather", FIRST), ("next.one-two", SECOND)]
    text = f"I look.\n{form(*calls)}"
    assert whole(mistral, text) == streamed(mistral, list(text)) == ("I look.", calls)
    spaced = text.replace(CALLS, CALLS + " ").replace(ARGS + "{", ARGS + "\n{")
    assert whole(mistral, spaced + "Then") == ("I look.\nThen", calls)


@pytest.mark.parametrize(
    "text",
    [
        " a [1] [TOOL",
        "[ARGS]{}",
        CALLS,
        CALLS + " none",
        CALLS + "none " * 100 + ARGS + "{}",
        CALLS + "[]",
        CALLS + "[7]",
        CALLS + '[{"name": "f"',
        CALLS + '{"name": "f", "arguments": {}}',
        CALLS + "f",
        CALLS + "f" + ARGS,
        CALLS + "f" + ARGS + " 7",
        CALLS + ARGS + "{}",
        CALLS + "two words" + ARGS + "{}",
        CALLS + "f[CALL_ID]" + ARGS + "{}",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert whole(mistral, text) == streamed(mistral, list(text)) == (text, [])


def test_ids() -> None:
    """The templates refuse every id but nine letters and digits."""
    text = f"{CALLS}f[CALL_ID]abcDEF123{ARGS}{{}}{CALLS}g[CALL_ID]abcDEF123{ARGS}{{}}" + array(
        ("h", "{}")
    )
    ids = [call.call_id or "" for call in mistral().parse(text).calls]
    assert ids[0] == "abcDEF123" and len(set(ids)) == 3
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids)


def test_pieces_go_out_at_once() -> None:
    parser = mistral()
    assert parser.feed("Hi [TOOL_CALLS]f[ARGS] ").content == "Hi"
    [begun] = parser.feed('{"a": "x').calls
    assert (begun.index, begun.name, begun.arguments) == (0, "f", '{"a": "x')
    assert parser.feed('"}[TOOL_').calls == (CallDelta(0, None, '"}'),)
    [begun] = parser.feed("CALLS]g[ARGS]{}").calls
    assert (begun.index, begun.name, begun.arguments) == (1, "g", "{}")


@pytest.mark.parametrize(
    "cut", ['f[ARGS]{"a": 1', 'f[ARGS]{"a" 1} [TOOL', '[{"name":"f","arguments":{']
)
def test_a_cut_or_broken_call_is_content_at_the_end(cut: str) -> None:
    text = f"So: {CALLS}{cut}"
    assert mistral().end(text).content == text
    assert whole(mistral, text)[1][0][0] == "f"


def test_a_broken_call_ends_where_the_next_begins() -> None:
    text = f'{CALLS}f{ARGS}{{"a" 1}}{CALLS}g{ARGS}{{}}'
    assert whole(mistral, text) == ("", [("f", '{"a" 1}'), ("g", "{}")])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["f", "g.h"]), ARGUMENTS), min_size=1, max_size=3), CUTS)
def test_any_calls_come_back_under_any_cut(calls: list[tuple[str, dict]], cuts: list[int]) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    for form in (array, one_by_one):
        text = "So: " + form(*written)
        assert whole(mistral, text) == streamed(mistral, pieces(text, cuts)) == ("So:", written)


FRAGMENTS = st.sampled_from(
    [
        *(CALLS, ARGS, "[CALL_ID]", "[TOOL_", "[AR", "f", " ", "\n", "[", "]", "{", "}", "{}", ","),
        *('{"name": "f", "arguments": {', '{"a": 1', '"', ":", "\\", "x" * 250, "text ", "<"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=14).map("".join), CUTS)
def test_streaming_equals_parsing_at_once(text: str, cuts: list[int]) -> None:
    expected = whole(mistral, text)
    assert streamed(mistral, pieces(text, cuts)) == expected
    assert streamed(mistral, list(text)) == expected
