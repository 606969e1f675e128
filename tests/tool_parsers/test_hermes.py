# SPDX-License-Identifier: Apache-2.0
"""JSON calls between tags."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tool_parsers.splitting import CUTS, MESSY, joined, pieces, streamed, whole
from vllm.tool_parsers import CallDelta, ToolParser, tool_parsers


def hermes() -> ToolParser:
    return tool_parsers.get("hermes")({})


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def test_content_and_calls() -> None:
    first, second = '{"city": "Köln <b>"}', '{ "deep": {"list": [1, {"}": "]"}]} , "e": 1e3}'
    text = f"I look.\n\n{call('weather', first)}\n{call('next', second)}\n"
    assert whole(hermes, text) == ("I look.", [("weather", first), ("next", second)])


def test_text_without_calls_is_untouched() -> None:
    for text in ("", " a\n", "\n\n", "1 < 2 <tool", "</tool_call>"):
        assert whole(hermes, text) == (text, [])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "f", "arguments": {}}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"arguments": {"a": "}"}, "name": "f"}', '{"a": "}"}'),
        ('{"arguments": "{}", "name": "f"}', "{}"),
        ('{"id": 7, "name": "f", "arguments": {"a": 1}, "x": [{}]}', '{"a": 1}'),
        ('{"n\\u0061me": "f", "arguments": {"a": "\\\\"}}', '{"a": "\\\\"}'),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"b": 2}}', '{"a": 1}'),
    ],
)
def test_forms_of_arguments(body: str, expected: str) -> None:
    assert whole(hermes, f"<tool_call>{body}</tool_call>") == ("", [("f", expected)])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call> not json </tool_call> after",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f"',
        "<tool_call>{}</tool_call>",
        "<tool_call>{'name': 'f'}</tool_call>",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert whole(hermes, text) == (text, [])


def test_calls_that_end_badly() -> None:
    begin = '<tool_call>{"name": "f", "arguments": {"a": "b'
    assert whole(hermes, begin) == ("", [("f", '{"a": "b')])
    assert whole(hermes, begin + '"}</tool_call>') == ("", [("f", '{"a": "b"}')])
    two = begin + '"}}\n' + call("g", "{}")
    assert whole(hermes, two) == ("", [("f", '{"a": "b"}'), ("g", "{}")])
    torn = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>' + call("g", "{}")
    assert whole(hermes, torn) == ("", [("f", '{"a": 1'), ("g", "{}")])
    assert whole(hermes, call("f", "{}") + " and so") == ("and so", [("f", "{}")])
    assert whole(hermes, "<tool_call>" + call("f", "{}")) == ("<tool_call>", [("f", "{}")])


@pytest.mark.parametrize("rest", ["<tool_call>", '<tool_call>{"name"', " and so"])
def test_a_torn_call_before_the_last_text_is_a_call(rest: str) -> None:
    """As in a stream: its text was lost where another began, or came after what followed it."""
    torn = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'
    assert joined([hermes().end("So" + torn + rest)]) == ("So" + rest, [("f", '{"a": 1')])
    cut = torn.removesuffix("</tool_call>")
    assert joined([hermes().end(cut)]) == (cut, [])


def test_pieces_go_out_at_once() -> None:
    parser = hermes()
    assert parser.feed('Hi <tool_call>{"name": "f", "arguments"').content == "Hi"
    assert parser.feed(': {"a": "x').calls == (CallDelta(0, "f", '{"a": "x'),)
    assert parser.feed("y").calls == (CallDelta(0, None, "y"),)
    assert parser.feed('"}').calls == (CallDelta(0, None, '"}'),)
    assert parser.feed("}\n</tool_ca").calls == ()
    assert parser.feed('ll><tool_call>{"name":"g","arguments":{}').calls == (
        CallDelta(1, "g", "{}"),
    )
    assert parser.feed("1").calls == parser.finish().calls == ()


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=4,
    ),
    max_size=3,
)
NAMES = st.text("abz_-é", min_size=1, max_size=5)


@given(st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3), st.sampled_from(["", "So: "]), CUTS)
def test_any_calls_come_back_under_any_cut(
    calls: list[tuple[str, dict]], content: str, cuts: list[int]
) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    text = content + "\n".join(call(name, arguments) for name, arguments in written)
    expected = (content.strip() if calls else content, written)
    assert whole(hermes, text) == streamed(hermes, pieces(text, cuts)) == expected


@given(MESSY, CUTS)
def test_streaming_equals_parsing_at_once(text: str, cuts: list[int]) -> None:
    expected = whole(hermes, text)
    assert streamed(hermes, pieces(text, cuts)) == expected
    assert streamed(hermes, list(text)) == expected
