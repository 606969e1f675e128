# SPDX-License-Identifier: Apache-2.0
"""Constraints behind reasoning, followed byte by byte through the grammar library."""

from __future__ import annotations

import json

import pytest

from vllm.entrypoints.openai.serving_chat import constrain_after_reasoning
from vllm.exceptions import VLLMValidationError
from vllm.reasoning import reasoning_parsers
from vllm.sampling_params import ReasoningBudget, StructuredOutputsParams
from vllm.v1.structured_output.spec import GrammarSpec
from vllm.v1.structured_output.vocabulary import byte_vocabulary

xgrammar = pytest.importorskip("xgrammar")

STOP = 256
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
#: a constraint, a text that follows it and one that does not
KINDS = [
    ({"json": SCHEMA}, '{"a": 1}', '{"a": "1"}'),
    ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, '{"a": 1}', '{"b": 1}'),
    ({"json_object": True}, '{"x": [1]}', "[1]"),
    ({"regex": "a+b"}, "aab", "b"),
    ({"choice": ["yes", 'n"o']}, 'n"o', "maybe"),
    ({"grammar": 'root ::= "x" | "yy"'}, "yy", "xy"),
    (
        {
            "structural_tag": json.dumps(
                {"type": "structural_tag", "format": {"type": "const_string", "value": "z"}}
            )
        },
        "z",
        "y",
    ),
]


def follows(constraint: StructuredOutputsParams, text: str) -> bool:
    compiler = xgrammar.GrammarCompiler(byte_vocabulary())
    matcher = xgrammar.GrammarMatcher(GrammarSpec.from_params(constraint).compile(compiler))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(STOP)


@pytest.mark.parametrize(("fields", "good", "bad"), KINDS, ids=lambda f: str(f)[:20])
def test_reasoning_then_content(fields: dict, good: str, bad: str) -> None:
    wrapped = constrain_after_reasoning(
        StructuredOutputsParams(**fields), reasoning_parsers.get("qwen3")("<think>\n"), 1000
    )
    for text, expected in ((good, True), (bad, False)):
        for before in ("", "hm é [1] </thin", "<think>hm"):
            for space in ("", "\n\n"):
                assert follows(wrapped, f"{before}</think>{space}{text}") is expected
        assert not follows(wrapped, text)


def test_reasoning_that_the_model_may_skip() -> None:
    given = StructuredOutputsParams(json=SCHEMA)
    wrapped = constrain_after_reasoning(given, reasoning_parsers.get("qwen3")("assistant\n"), 1000)
    for text in ('{"a": 1}', '<think>hm</think>\n\n{"a": 1}'):
        assert follows(wrapped, text)
    for text in ('hm</think>{"a": 1}', '<think>hm{"a": 1}', "<think>hm</think>{}"):
        assert not follows(wrapped, text)


def test_closed_reasoning_leaves_the_constraint() -> None:
    given = StructuredOutputsParams(json=SCHEMA)
    for name in ("qwen3", "deepseek_r1"):
        parser = reasoning_parsers.get(name)("<think>\n\n</think>\n\n")
        assert constrain_after_reasoning(given, parser, 1000) is given


@pytest.mark.parametrize(
    ("max_tokens", "allowed"), [(40, 0), (256, 0), (300, 44), (512, 256), (4096, 2048)]
)
def test_reasoning_leaves_tokens_for_the_answer(max_tokens: int, allowed: int) -> None:
    given = StructuredOutputsParams(json=SCHEMA)
    for prompt, begin in (("<think>\n", ""), ("assistant\n", "<think>")):
        parser = reasoning_parsers.get("qwen3")(prompt)
        wrapped = constrain_after_reasoning(given, parser, max_tokens)
        if begin and not allowed:
            assert wrapped is given  # it begins with the answer
        else:
            assert wrapped.reasoning == ReasoningBudget(begin, "</think>", allowed)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structural_tag": '{"structures": [], "triggers": []}'}, "key `format`"),
        ({"structural_tag": "[]"}, "must be a JSON object"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json_object": False}, "json_object can only be true"),
        ({"choice": []}, "at least one string"),
    ],
)
def test_refusals(fields: dict, words: str) -> None:
    parser = reasoning_parsers.get("deepseek_r1")()
    with pytest.raises(VLLMValidationError, match=words) as error:
        constrain_after_reasoning(StructuredOutputsParams(**fields), parser, 1000)
    assert error.value.parameter == "structured_outputs"


def test_unknown_options_are_refused_as_without_reasoning() -> None:
    parser = reasoning_parsers.get("deepseek_r1")()
    given = StructuredOutputsParams(choice=["a"], whitespace_pattern=" ")
    with pytest.raises(VLLMValidationError, match="disable_any_whitespace") as error:
        constrain_after_reasoning(given, parser, 1000)
    assert error.value.parameter == "structured_outputs.whitespace_pattern"
