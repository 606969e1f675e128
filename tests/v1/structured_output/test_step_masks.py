# SPDX-License-Identifier: Apache-2.0
"""Masks along drafts: each is the mask of a grammar that has seen these tokens and no others."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from tests.v1.engine.fakes import EOS, VOCAB_SIZE
from tests.v1.structured_output.vocabularies import (
    FIRST_BYTE,
    request_grammar,
    token_texts,
    tokens_of,
)
from vllm.reasoning import reasoning_parsers
from vllm.sampling_params import ReasoningBudget, SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.grammar import RequestGrammar
from vllm.v1.structured_output.masks import StepMasks
from vllm.v1.structured_output.reasoning_limit import ReasoningLimit

MOST_DRAFTS = 4
ALL = list(range(VOCAB_SIZE))


def reasoned(max_tokens: int) -> StructuredOutputsParams:
    parser = reasoning_parsers.get("qwen3")("<think>\n")
    answer = {"type": "regex", "pattern": "(yes|no)[ab]{2}é"}
    tag = {"type": "structural_tag", "format": parser.with_reasoning(answer)}
    bounds = parser.bounds()
    assert bounds is not None
    budget = ReasoningBudget(*bounds, max_tokens)
    return StructuredOutputsParams(structural_tag=json.dumps(tag), reasoning=budget)


#: a constraint, and what else the request asks for
CASES: dict[str, tuple[StructuredOutputsParams, dict[str, Any]]] = {
    "regex": (StructuredOutputsParams(regex="(ab|ba){1,6}[é-ö]{2}"), {}),
    "json": (StructuredOutputsParams(json={"type": "array", "items": {"enum": ["a", 1]}}), {}),
    "grammar": (StructuredOutputsParams(grammar='root ::= "(" root ")" | "ab"'), {}),
    "longer": (StructuredOutputsParams(regex="a{1,9}"), {"min_tokens": 4}),
    "dead end": (
        StructuredOutputsParams(regex="[ab]{3}c"),
        {"allowed_token_ids": [FIRST_BYTE + ord("a"), FIRST_BYTE + ord("b")]},
    ),
    "reasoning": (reasoned(3), {}),
    "short reasoning": (reasoned(0), {}),
}


def make(name: str) -> RequestGrammar:
    constraint, fields = CASES[name]
    params = SamplingParams(max_tokens=100, structured_outputs=constraint, **fields)
    return request_grammar(params)


def rows(grammar: RequestGrammar, drafts: list[int]) -> list[list[int]]:
    """The tokens that each row allows; rows that are not counted are not written."""
    masks = np.full((MOST_DRAFTS + 2, grammar.num_words), 5, dtype=np.int32)
    count = grammar.fill(masks, 0, drafts)
    assert 1 <= count <= 1 + len(drafts) and (masks[count:] == 5).all()
    return [tokens_of(mask) for mask in masks[:count]]


def alone(name: str, tokens: list[int]) -> list[int]:
    """What may follow `tokens`, by a grammar that is asked after each of them."""
    grammar = make(name)
    for token in tokens:
        rows(grammar, [])
        assert grammar.accept(token) and not grammar.terminated
    (row,) = rows(grammar, [])
    return row


def drafts_after(name: str, text: list[int], source: random.Random) -> list[int]:
    """Mostly what the grammar allows, now and then past its end."""
    drafts: list[int] = []
    while len(drafts) < MOST_DRAFTS:
        try:
            allowed = alone(name, text + drafts)
        except AssertionError:
            allowed = ALL
        drafts.append(source.choice(ALL if source.random() < 0.1 else allowed))
    return drafts


@pytest.mark.parametrize("name", CASES)
def test_a_text_by_drafts_is_that_without(name: str) -> None:
    """Some drafts are taken, others are not, some steps come to nothing; some tokens go back."""
    source = random.Random(name)
    ahead = 0
    for _ in range(4):
        grammar, text = make(name), list[int]()
        while not grammar.terminated and len(text) < 25:
            drafts = drafts_after(name, text, source)
            found = rows(grammar, drafts)
            for i, allowed in enumerate(found):
                assert allowed == alone(name, text + drafts[:i]), (text, drafts[:i])
            if len(found) <= len(drafts) and found[-1] != ALL:
                last = drafts[len(found) - 1]
                assert last == EOS or last not in found[-1], "rows end for a reason"
            ahead += len(found) - 1
            if source.random() < 0.2:
                continue  # a preemption: what was sampled is dropped
            taken = source.randrange(len(found))
            tokens = [*drafts[:taken], source.choice(found[taken])]
            if found[taken] == ALL:
                assert all(grammar.accept(token) for token in tokens[:-1])
                assert not grammar.accept(tokens[-1])
                assert "no token may follow" in grammar.error().message
                break
            assert all(grammar.accept(token) for token in tokens)
            text += tokens
            if source.random() < 0.1:
                del text[source.randrange(len(text)) :]
                grammar.rewind(len(text))
    assert ahead > 10


def test_drafts_do_not_end_a_text() -> None:
    grammar = make("grammar")
    a, b = FIRST_BYTE + ord("a"), FIRST_BYTE + ord("b")
    assert len(rows(grammar, [a, b, EOS, a])) == 3, "nothing follows the end"
    assert not grammar.terminated
    assert grammar.accept(a) and grammar.accept(b) and not grammar.terminated
    assert grammar.accept(EOS) and grammar.terminated


def test_a_closing_tag_of_other_drafts_is_forgotten() -> None:
    """Two texts of as many tokens: one has begun the tag that the budget asks for."""
    grammar, other = make("reasoning"), make("reasoning")
    h, lower, bar = (FIRST_BYTE + ord(c) for c in "h</")
    assert len(rows(grammar, [h, lower, bar, lower])) == 4
    assert all(grammar.accept(token) for token in (h, lower, h))
    for token in (h, lower, h):
        rows(other, [])
        assert other.accept(token)
    expected = rows(other, [])
    assert rows(grammar, []) == expected
    assert {token_texts()[token] for token in expected[0]} == {b"<"}


def requests() -> list[Request]:
    made = []
    for i, name in enumerate(("regex", "grammar", "json", "regex")):
        params = SamplingParams(max_tokens=9, structured_outputs=CASES[name][0])
        made.append(Request(str(i), [1, 2], params))
        made[-1].grammar = make(name)
    return made


def test_the_masks_of_a_step() -> None:
    """One row per request, and one for each draft of those that the step verifies."""
    first, second, third, ended = requests()
    a, b, left = (FIRST_BYTE + ord(c) for c in "ab(")
    first.draft_token_ids = [a, b, b, a]
    second.draft_token_ids = [left, b, a]
    third.draft_token_ids = []
    ended.draft_token_ids = [a, b]
    ended.status = RequestStatus.FINISHED_ABORTED
    step = StepMasks([first, second, third, ended], [2, 3, 3, 3])
    for _ in range(2):
        words, counts = step.filled()
        assert words.dtype == np.int32 and len(words) == sum(counts) and counts == [3, 2, 1, 1]
        found = [tokens_of(row) for row in words]
        assert found[:3] == [alone("regex", [a, b][:i]) for i in range(3)]
        assert found[3:5] == [alone("grammar", [left][:i]) for i in range(2)]
        assert found[5] == alone("json", []) and found[6] == ALL


def test_without_drafts_a_request_has_one_row() -> None:
    """What was proposed for an earlier, wider step is not looked at."""
    for request in (made := requests()):
        request.draft_token_ids = [FIRST_BYTE + ord("a")]
    words, counts = StepMasks(made, [0, 0, 0, 0]).filled()
    assert counts == [1, 1, 1, 1] and len(words) == 4


def test_a_matcher_that_stays_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestGrammar, "_go_back", lambda grammar, num_tokens: None)
    with pytest.raises(AssertionError):
        test_a_text_by_drafts_is_that_without("regex")


def test_a_budget_that_stays_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReasoningLimit, "rewind", lambda limit, num_tokens: None)
    with pytest.raises(AssertionError):
        test_a_closing_tag_of_other_drafts_is_forgotten()
