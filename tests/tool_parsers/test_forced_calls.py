# SPDX-License-Identifier: Apache-2.0
"""The two formats of calls that a request forces: a list, and bare arguments."""

import pytest
from hypothesis import given

from tests.tool_parsers.splitting import CUTS, MESSY, pieces, streamed, whole
from vllm.entrypoints.openai.chat_reply import NamedCallParser
from vllm.tool_parsers import CallDelta, ToolParser
from vllm.tool_parsers.json_list import JsonListParser


def listed() -> ToolParser:
    return JsonListParser({})


def named() -> ToolParser:
    return NamedCallParser({}, "f")


def test_a_list_of_calls() -> None:
    text = '[{"name": "f", "parameters": {"a": [1]}},\n {"name": "g", "parameters": {}}]\n'
    assert whole(listed, text) == ("", [("f", '{"a": [1]}'), ("g", "{}")])
    assert whole(listed, text[:37]) == ("", [("f", '{"a": [1')])
    assert whole(listed, text[:50]) == ('{"name"', [("f", '{"a": [1]}')])


@pytest.mark.parametrize(
    "text",
    [
        *("", " \n", "words", "[]", "[ 1]", "[", "[,{}", "\n[\n]"),
        *('[ {"name": 1}]', '[\n{"name": "f"', '{"name": "f"}'),
    ],
)
def test_anything_else_is_content(text: str) -> None:
    assert whole(listed, text) == (text, [])


def test_bare_arguments() -> None:
    parser = named()
    assert parser.feed("").calls == ()
    assert parser.feed('{"a"').calls == (CallDelta(0, "f", '{"a"'),)
    assert parser.feed(": 1} ").calls == (CallDelta(0, None, ": 1}"),)
    assert parser.finish().calls == ()


def test_what_follows_the_arguments_is_content() -> None:
    for text in ('{"a": "}"}<|im_end|>', '{"a": "}"}\n<|im_end|>'):
        assert whole(named, text) == ("<|im_end|>", [("f", '{"a": "}"}')])
        ended = named().end(text)
        assert (ended.content, ended.calls) == ("<|im_end|>", (CallDelta(0, "f", '{"a": "}"}'),))


@given(MESSY, CUTS)
def test_streaming_equals_parsing_at_once(text: str, cuts: list[int]) -> None:
    for make in (listed, named):
        expected = whole(make, text)
        assert streamed(make, pieces(text, cuts)) == expected
        assert streamed(make, list(text)) == expected
