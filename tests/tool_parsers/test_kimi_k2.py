# SPDX-License-Identifier: Apache-2.0
"""Calls in Kimi-K2's section."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tool_parsers.splitting import CUTS, pieces, streamed, whole
from vllm.tool_parsers import ToolParser, tool_parsers

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


def kimi() -> ToolParser:
    return tool_parsers.get("kimi_k2")({})


def call(name: str, arguments: str) -> str:
    return f"{CALL}{name}{ARGUMENTS}{arguments}{CALL_END}"


def test_content_and_calls() -> None:
    first, second = '{"city": "Köln <|b|>"}', ' {"deep": [1, {"}": "]"}]}'
    calls = call("functions.weather:0", first) + "\n" + call("functions.next.one:12", second)
    text = f"I look.\n{SECTION}\n{calls}{SECTION_END}"
    assert whole(kimi, text) == ("I look.", [("weather", first), ("next.one", second)])


def test_text_without_calls_is_untouched() -> None:
    for text in ("", " a\n", "1 <| 2", SECTION[:-1], CALL + "f" + CALL_END):
        assert whole(kimi, text) == (text, [])


@pytest.mark.parametrize("name", ["f", "functions.f", " functions.f:3 ", "f:0"])
def test_forms_of_ids(name: str) -> None:
    assert whole(kimi, SECTION + call(name, "{}")) == ("", [("f", "{}")])


def test_ids_with_a_number_are_kept_once() -> None:
    """Two calls of one id could not be told apart."""
    names = ("functions.f:0", " functions.g:1\n", "f:2", "functions.f:0", "functions.f", "f")
    found = kimi().parse(SECTION + "".join(call(name, "{}") for name in names)).calls
    assert [each.name for each in found] == ["f", "g", "f", "f", "f", "f"]
    ids = ["functions.f:0", "functions.g:1", "f:2", None, None, None]
    assert [each.call_id for each in found] == ids


@pytest.mark.parametrize("body", [call("", "{}")[: -len("{}" + CALL_END)], f"{CALL}f{CALL_END}"])
def test_what_has_no_id_or_arguments_stays_content(body: str) -> None:
    assert whole(kimi, SECTION + body) == (body, [])


def test_a_call_that_is_cut_is_content() -> None:
    cut = kimi().end(f'{SECTION}{CALL}f:0{ARGUMENTS}{{"a": <|tool')
    assert (cut.content, cut.calls) == (f'{CALL}f:0{ARGUMENTS}{{"a": <|tool', ())
    complete = kimi().end(f'{SECTION}{CALL}f:0{ARGUMENTS}{{"a": 1}}')
    assert [each.name for each in complete.calls] == ["f"]


FRAGMENTS = st.sampled_from(
    [
        SECTION,
        SECTION_END,
        CALL,
        CALL_END,
        ARGUMENTS,
        "functions.f:0",
        "f",
        "{",
        "}",
        "<|",
        "x ",
        "\n",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAGMENTS, max_size=10).map("".join), CUTS)
def test_cuts_do_not_matter(text: str, cuts: list[int]) -> None:
    assert streamed(kimi, pieces(text, cuts)) == whole(kimi, text)
