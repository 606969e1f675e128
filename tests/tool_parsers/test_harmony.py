# SPDX-License-Identifier: Apache-2.0
"""Calls and reasoning as messages of the harmony format."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tool_parsers.splitting import CUTS, pieces, streamed, whole
from vllm.entrypoints.openai.chat_reply import ReplySplitter
from vllm.reasoning import ReasoningDelta, ReasoningParser, reasoning_parsers
from vllm.tool_parsers import ToolParser, tool_parsers

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>"


def tool() -> ToolParser:
    return tool_parsers.get("harmony")({})


def reasoning(prompt: str = "<|start|>assistant", continued: str = "") -> ReasoningParser:
    return reasoning_parsers.get("harmony")(prompt, continued)


def test_reasoning_and_answer() -> None:
    text = f"{ANALYSIS}It is 2.<|end|>{FINAL}Two."
    assert reasoning().parse(text) == ReasoningDelta("It is 2.", "Two.")
    assert reasoning().parse(text + "<|return|>") == ReasoningDelta("It is 2.", "Two.")
    assert reasoning().parse(f"{ANALYSIS}It is") == ReasoningDelta("It is")
    assert reasoning().parse("<|channel|>final<|message|>Two.") == ReasoningDelta("", "Two.")


def test_messages_of_one_side_are_lines() -> None:
    again = f"<|end|><|start|>assistant{ANALYSIS}b<|end|>{PREAMBLE}I look.<|end|>{FINAL}Two."
    assert reasoning().parse(f"{ANALYSIS}a{again}") == ReasoningDelta("a\nb", "I look.\nTwo.")


@pytest.mark.parametrize("text", ["", "Two <|", " to=", " to=two of us", "\n", "a < b\n"])
def test_text_without_messages_is_untouched(text: str) -> None:
    assert reasoning().parse(text) == ReasoningDelta("", text)
    assert whole(tool, text) == (text, [])


def test_calls() -> None:
    text = f'{PREAMBLE}I look.<|end|>{CALL}{{"a": "<b>"}}<|call|>{CALL}{{}}<|call|>'
    assert whole(tool, text) == ("I look.", [("f", '{"a": "<b>"}'), ("f", "{}")])


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|start|>assistant to=functions.f<|channel|>analysis<|message|>",
    ],
)
def test_forms_of_headers(header: str) -> None:
    assert whole(tool, f'{header}{{"a": 1}}<|call|>') == ("", [("f", '{"a": 1}')])
    assert whole(tool, f"{header} <|call|>") == ("", [("f", " {}")])
    split = reasoning().parse(f'{header}{{"a": 1}}')
    assert split == ReasoningDelta("", f'{header}{{"a": 1}}')


def test_messages_to_others_stay_content() -> None:
    text = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    assert whole(tool, text) == (text, [])
    assert reasoning().parse(text) == ReasoningDelta("", text)
    assert whole(tool, "<|channel|>commentary to=functions.<|message|>x") == (
        "<|channel|>commentary to=functions.<|message|>x",
        [],
    )


def test_a_call_that_is_cut_is_content() -> None:
    """What stopped by itself is complete without `<|call|>`, which ends generation."""
    cut = tool().end(f'{CALL}{{"a": 1')
    assert (cut.content, cut.calls) == (f'{CALL}{{"a": 1', ())
    complete = tool().end(f'{CALL}{{"a": 1}}')
    assert [call.name for call in complete.calls] == ["f"]


def test_both_parsers_together() -> None:
    """The reasoning parser leaves the markup of calls to the tool parser."""
    text = f'{ANALYSIS}Hm.<|end|>{PREAMBLE}I look.<|end|>{CALL}{{"a": 1}}'
    for parts in ([text], list(text)):
        splitter = ReplySplitter(reasoning(), tool(), include_reasoning=True)
        deltas = [splitter.feed(part, finished=False) for part in parts[:-1]]
        deltas.append(splitter.feed(parts[-1], finished=True))
        assert "".join(delta.reasoning for delta in deltas) == "Hm."
        assert "".join(delta.content for delta in deltas) == "I look."
        calls = [call for delta in deltas for call in delta.calls]
        assert calls[0].name == "f"
        assert "".join(call.arguments for call in calls) == '{"a": 1}'


def test_where_reasoning_may_be() -> None:
    assert reasoning().may_reason()
    assert not reasoning("<|start|>assistant<|channel|>final<|message|>").may_reason()
    assert not reasoning(continued="Tw").may_reason()
    assert reasoning().bounds() is None


FRAGMENTS = st.sampled_from(
    [ANALYSIS, FINAL, CALL, PREAMBLE, "<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|"]
    + ["<|message|>", "<|channel|>", " to=x", "{", "}", '{"a": 1}', "text ", "\n", "é"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAGMENTS, max_size=10).map("".join), CUTS)
def test_cuts_do_not_matter(text: str, cuts: list[int]) -> None:
    parts = pieces(text, cuts)
    assert streamed(tool, parts) == whole(tool, text)
    parser = reasoning()
    deltas = [*(parser.feed(part) for part in parts), parser.finish()]
    joined = ReasoningDelta(
        "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)
    )
    assert joined == reasoning().parse(text)
