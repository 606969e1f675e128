# SPDX-License-Identifier: Apache-2.0
"""Calls as a list of Python calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tool_parsers.splitting import CUTS, pieces, streamed, whole
from vllm.tool_parsers import CallDelta, ToolParser, ToolSchemas, tool_parsers


def pythonic(tools: ToolSchemas | None = None) -> ToolParser:
    return tool_parsers.get("pythonic")(tools or {})


def arguments_of(written: str) -> Any:
    content, [(name, arguments)] = whole(pythonic, f"[f(a={written})]")
    assert (content, name) == ("", "f")
    return json.loads(arguments)["a"]


def test_content_and_calls() -> None:
    text = 'I look.\n[weather(city="Köln )]", days = 3),\n next.one-two( ) ]after'
    calls = [("weather", '{"city": "Köln )]", "days": 3}'), ("next.one-two", "{}")]
    assert whole(pythonic, text) == ("I look.\nafter", calls)
    assert whole(pythonic, "[f(a=1,)]\n[g()]") == ("", [("f", '{"a": 1}'), ("g", "{}")])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("-1.5", -1.5),
        ("0x10", 16),
        ('[1, ("a", {"b": [true]}), ]', [1, ["a", {"b": [True]}]]),
        ("{}", {}),
        ('"it\'s"', "it's"),
        (r"'it\'s \u00e9\n'", "it's é\n"),
        ("'a' \"b\"", "ab"),
        ("''", ""),
        ("'''it's (\n\"\"'''", 'it\'s (\n""'),
        ('"""""" "x"', "x"),
        ("'two\nlines'", "two\nlines"),
        (r"'C:\dir\\ \w'", r"C:\dir\ \w"),
        (r"r'\d+\w'", r"\d+\w"),
    ],
)
def test_values(written: str, value: Any) -> None:
    assert arguments_of(written) == value


def test_parameters_may_be_named_as_keywords() -> None:
    assert whole(pythonic, '[f(from="Oslo", class=1)]') == (
        "",
        [("f", '{"from": "Oslo", "class": 1}')],
    )


@pytest.mark.parametrize(
    "text",
    [
        " a\n",
        "[",
        "[]",
        '["a", 1]',
        "[a](http://b)",
        "[f]",
        "[f(x)]",
        "[f(1)]",
        "[f(a=b)]",
        "[f(a=1+1)]",
        "[f(a=open('x'))]",
        "[f(a=f'{b}')]",
        "[f(a=b'x')]",
        "[f(a=1j)]",
        "[f(a=-True)]",
        "[f(a=1e999)]",
        r"[f(a='\ud800')]",
        "[f(a='\0')]",
        "[f(a={1: 2})]",
        "[f(a={**b})]",
        "[f(a=[1)]",
        "[f(a=1, a=2)]",
        "[f(,)]",
        "[f(a=)]",
        "[f(**a)]",
        "[f (a=1)]",
        "[f(a=1) for a in b]",
        "[f(a=1).b]",
        "[f(a='open",
        "[f(a=1",
        f"[f(a={'[' * 2000}",
        f"[f(a={'-' * 20000}1)]",
        f"[f(a={'1+' * 20000}1)]",
        f"[f(a={'9' * 5000})]",
        f"[{'f' * 300}()]",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert whole(pythonic, text) == (text, [])
    assert streamed(pythonic, list(text)) == (text, [])


def test_a_list_may_begin_anywhere_and_end_badly() -> None:
    one = [("f", '{"a": 1}')]
    assert whole(pythonic, "see [[f(a=1)]") == ("see [", one)
    for end in ("", " ", "\n", "]", ",", ", "):
        content, calls = whole(pythonic, "[f(a=1)" + end)
        assert (content.strip(", "), calls) == ("", one)
    assert whole(pythonic, "[f(a=1), 7]") == (", 7]", one)


def test_only_tools_are_called_where_tools_are_given() -> None:
    def known() -> ToolParser:
        return pythonic({"f": {}})

    text = "points = [Point(x=1)]\n[f(a=1)]"
    assert whole(known, text) == ("points = [Point(x=1)]", [("f", '{"a": 1}')])


def test_a_call_goes_out_whole() -> None:
    parser = pythonic()
    assert parser.feed('Hi [f(a="x').content == "Hi"
    assert parser.feed('")').calls == ()
    assert parser.feed(", g").calls == (CallDelta(0, "f", '{"a": "x"}'),)
    assert parser.feed("()]").calls == (CallDelta(1, "g", "{}"),)


def test_a_cut_call_is_content_at_the_end() -> None:
    delta = pythonic().end("[f(a=1), g(b='so")
    assert (delta.content, [call.name for call in delta.calls]) == (", g(b='so", ["f"])


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab'\"", max_size=3), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["a", "in", "c"]), LITERALS), min_size=1), CUTS)
def test_any_calls_come_back_under_any_cut(calls: list[dict[str, Any]], cuts: list[int]) -> None:
    """Python's own `repr` writes what the parser reads."""
    written = ", ".join(
        f"f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for arguments in calls
    )
    content, found = streamed(pythonic, pieces(f"So: [{written}]", cuts))
    assert (content, [json.loads(arguments) for _, arguments in found]) == ("So:", calls)


FRAGMENTS = st.sampled_from(
    [
        *("[", "]", "f(", "g(a=", ")", ",", "'", '"', "'''", "\\", "\n", " ", "1", "r'x'", "a="),
        *("f(a=1)", "[f(a='x')", "{", "}", "{'a': 1}", "<function_calls>", "</function_calls>"),
        *("</func", "text", "-", "#", "é"),
    ]
)
MESSY_PYTHON = st.lists(FRAGMENTS, max_size=14).map("".join)


@settings(max_examples=300, deadline=None)
@given(MESSY_PYTHON, CUTS)
def test_streaming_equals_parsing_at_once(text: str, cuts: list[int]) -> None:
    expected = whole(pythonic, text)
    assert streamed(pythonic, pieces(text, cuts)) == expected
    assert streamed(pythonic, list(text)) == expected
