# SPDX-License-Identifier: Apache-2.0
"""Reasoning that would go on for ever is closed, and the answer follows the constraint."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from tests.v1.engine.fakes import EOS
from tests.v1.structured_output.vocabularies import request_grammar, token_texts, tokens_of
from vllm.exceptions import VLLMValidationError
from vllm.reasoning import reasoning_parsers
from vllm.sampling_params import ReasoningBudget, SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.grammar import RequestGrammar
from vllm.v1.structured_output.reasoning_limit import TokenTexts

TEXTS = token_texts()
ANSWER = {"type": "regex", "pattern": "(yes|no)</think>"}  # the answer may hold the tag, too


def make(limit: int, prompt: str = "<think>\n") -> RequestGrammar:
    parser = reasoning_parsers.get("qwen3")(prompt)
    tag = {"type": "structural_tag", "format": parser.with_reasoning(ANSWER)}
    begin, end = parser.bounds() or ("", "")
    constraint = StructuredOutputsParams(
        structural_tag=json.dumps(tag), reasoning=ReasoningBudget(begin, end, limit)
    )
    return request_grammar(SamplingParams(max_tokens=100, structured_outputs=constraint))


def allowed(grammar: RequestGrammar) -> list[int]:
    masks = np.zeros((1, grammar.num_words), dtype=np.int32)
    grammar.fill(masks, 0)
    return tokens_of(masks[0])


def say(grammar: RequestGrammar, text: str) -> None:
    """The text byte by byte, each allowed."""
    for byte in text.encode():
        token = TEXTS.index(bytes([byte]))
        assert token in allowed(grammar) and grammar.accept(token), (text, chr(byte))


def write(grammar: RequestGrammar, generator: np.random.Generator) -> bytes:
    """Any allowed tokens until the end."""
    tokens: list[int] = []
    while not grammar.terminated and len(tokens) < 200:
        tokens.append(int(generator.choice(allowed(grammar))))
        assert grammar.accept(tokens[-1])
    assert tokens[-1] == EOS
    return b"".join(TEXTS[token] for token in tokens[:-1])


@pytest.mark.parametrize("limit", [0, 1, 7, 30])
@pytest.mark.parametrize("prompt", ["<think>\n", "assistant"])
def test_any_reasoning_ends(limit: int, prompt: str) -> None:
    """A model that writes at random would not close its reasoning in 200 tokens."""
    generator = np.random.default_rng(limit)
    for _ in range(10):
        grammar = make(limit, prompt)
        if prompt == "assistant":
            say(grammar, "<think>")
        text = write(grammar, generator)
        reasoning, closed, answer = text.partition(b"</think>")
        assert closed and answer.strip() in (b"yes</think>", b"no</think>")
        # tokens have up to two bytes, and a few more may complete a character
        assert len(reasoning.removeprefix(b"<think>")) <= 2 * limit + 3


def test_it_waits_for_the_end_of_a_character() -> None:
    grammar = make(1)
    for byte in "é".encode():
        assert len(allowed(grammar)) > 1
        assert grammar.accept(TEXTS.index(bytes([byte])))
    assert [TEXTS[token] for token in allowed(grammar)] == [b"<"]
    say(grammar, "</think>no</think>")


def test_a_tag_that_has_begun_is_completed() -> None:
    grammar = make(5)
    say(grammar, "</thi")
    assert [TEXTS[token] for token in allowed(grammar)] == [b"n"]
    say(grammar, "nk>yes</think>")
    assert EOS in allowed(grammar)


@pytest.mark.parametrize("text", ["hm</think>\nyes", "</think>no", "hmmmm</think>y"])
def test_reasoning_within_its_limit_is_left_alone(text: str) -> None:
    grammar = make(12)
    say(grammar, text)
    say(grammar, {"s": "", "o": ""}.get(text[-1], "es") + "</think>")
    assert EOS in allowed(grammar)


def test_an_answer_without_reasoning_is_left_alone() -> None:
    grammar = make(2, "assistant")
    say(grammar, "yes</think>")


@pytest.mark.parametrize("kept", range(10))
def test_tokens_that_are_taken_back(kept: int) -> None:
    """The rest is the same whatever came and went before."""
    text = "hm, we"
    grammar, fresh = make(6), make(6)
    say(grammar, text + "</think>no")
    grammar.rewind(kept)
    say(fresh, (text + "</think>no")[:kept])
    assert allowed(grammar) == allowed(fresh)
    say(grammar, (text + "</think>no</think>")[kept:])
    assert EOS in allowed(grammar)


def test_spelling() -> None:
    texts = TokenTexts([b"", b"<", b"</", b"</think>", b"a", b"ab", b"b"])
    assert texts.spellings(b"aab") == [[4, 5], [5], [6]]
    tag = texts.spellings(b"</think>")
    assert tag[0] == [3] and tag[1:] == [None] * 7


def test_a_vocabulary_without_the_tag_is_the_requests_error() -> None:
    grammar = make(3)
    assert grammar.compile_error() is None
    compiled = grammar._compiled.result()
    grammar._compiled = Future()
    grammar._compiled.set_result(replace(compiled, texts=TokenTexts([b"a"])))
    assert "no tokens for '</think>'" in str(grammar.compile_error())


def test_budgets_that_make_no_sense() -> None:
    for fields in (("", "", 1), ("", "x", -1), ("", "x" * 65, 1), ("", "\ud800", 1)):
        with pytest.raises(VLLMValidationError, match="reasoning needs a begin and an end"):
            ReasoningBudget(*fields)
