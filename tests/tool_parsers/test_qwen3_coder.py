# SPDX-License-Identifier: Apache-2.0
"""Calls as nested tags."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tool_parsers.splitting import CUTS, MESSY, pieces, streamed, whole
from vllm.tool_parsers import CallDelta, ToolParser, tool_parsers

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "b": {"type": "boolean"},
        "list": {"type": "array", "items": {}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "enum": {"$ref": "#/$defs/Unit"},
        "any": {},
    },
    "$defs": {"Unit": {"enum": ["C", "F", 1]}},
}


def coder() -> ToolParser:
    return tool_parsers.get("qwen3_coder")({"f": SCHEMA})


def call(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def arguments_of(text: str) -> str:
    content, [(_, arguments)] = whole(coder, text)
    assert content == ""
    return arguments


def test_content_and_calls() -> None:
    text = f"First.\n\n{call('f', s='x', n='3')}\n{call('g')}"
    assert whole(coder, text) == ("First.", [("f", '{"s": "x", "n": 3}'), ("g", "{}")])


@pytest.mark.parametrize(
    ("parameter", "written", "expected"),
    [
        ("s", "plain", '"plain"'),
        ("s", "3", '"3"'),
        ("s", "null", '"null"'),
        ("s", 'say "hi"\n\ttwice \\ 🙂', '"say \\"hi\\"\\n\\ttwice \\\\ 🙂"'),
        ("s", "\nkept lines\n", '"\\nkept lines\\n"'),
        ("s", "", '""'),
        ("s", "if a < b: </div> <param>", '"if a < b: </div> <param>"'),
        ("n", " 42 ", "42"),
        ("n", "many", '"many"'),
        ("n", "NaN", '"NaN"'),
        ("b", "True", "true"),
        ("b", "false", "false"),
        ("list", '[1, {"a": "é"}]', '[1, {"a": "é"}]'),
        ("list", "[1,", '"[1,"'),
        ("maybe", "null", "null"),
        ("maybe", "None", "null"),
        ("maybe", "5", '"5"'),
        ("enum", "F", '"F"'),
        ("enum", "1", "1"),
        ("any", "2.5", "2.5"),
        ("any", "words here", '"words here"'),
        ("undeclared", "7", '"7"'),
    ],
)
def test_values_follow_the_schema(parameter: str, written: str, expected: str) -> None:
    assert arguments_of(call("f", **{parameter: written})) == f'{{"{parameter}": {expected}}}'


def test_forgotten_tags() -> None:
    assert arguments_of("<function=f><parameter=s>x</parameter></function>") == '{"s": "x"}'
    assert (
        arguments_of("<function=f><parameter=s>x<parameter=n>1</function>") == '{"s": "x", "n": 1}'
    )
    assert (
        arguments_of("<tool_call><function=f><parameter=n>1</parameter></tool_call>") == '{"n": 1}'
    )


def test_replies_cut_short_keep_their_arguments_open() -> None:
    text = call("f", s="one", n="12")
    assert arguments_of(text[: text.index("12") + 1]) == '{"s": "one", "n": '
    assert arguments_of(text[: text.index("ne\n")]) == '{"s": "o'
    assert arguments_of(text[: text.index("<parameter=n")]) == '{"s": "one"'


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n{}\n</tool_call>",
        "a <function=",
        "<function=>",
        "<function=f <b>",
        "if x <function=" + "y" * 300,
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert whole(coder, text) == (text, [])


def test_strings_go_out_at_once() -> None:
    parser = coder()
    assert parser.feed("<tool_call>\n<function=f>").calls == (CallDelta(0, "f", "{"),)
    assert parser.feed("\n<parameter=s>\nab").calls == (CallDelta(0, None, '"s": "ab'),)
    assert parser.feed('"c').calls == (CallDelta(0, None, '\\"c'),)
    assert parser.feed("\n</para").calls == ()
    assert parser.feed("meter>").calls == (CallDelta(0, None, '"'),)
    assert parser.feed("\n</function>\n</tool_call>").calls == (CallDelta(0, None, "}"),)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12).filter(
    lambda text: not any(tag in text for tag in ("</parameter", "<parameter=", "</function"))
)


@given(st.dictionaries(st.sampled_from(["s", "t", "u"]), TEXTS), st.integers(), CUTS)
def test_any_strings_come_back_under_any_cut(
    strings: dict[str, str], number: int, cuts: list[int]
) -> None:
    text = call("f", **strings, n=str(number))
    content, [(name, arguments)] = streamed(coder, pieces(text, cuts))
    assert (content, name) == ("", "f")
    assert json.loads(arguments) == {**strings, "n": number}
    assert whole(coder, text) == ("", [("f", arguments)])


@given(MESSY, CUTS)
def test_streaming_equals_parsing_at_once(text: str, cuts: list[int]) -> None:
    expected = whole(coder, text)
    assert streamed(coder, pieces(text, cuts)) == expected
    assert streamed(coder, list(text)) == expected
