# SPDX-License-Identifier: Apache-2.0
"""Beam search over a made-up model, against the score of every possible sequence."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from vllm.beam_search import BeamSearch, BeamSearchOutput
from vllm.logprobs import Logprob
from vllm.sampling_params import BeamSearchParams

VOCAB = 5
END, OTHER_END = 0, 4
PROMPT = [3, 1]


def next_logprobs(tokens: list[int]) -> dict[int, Logprob]:
    """A random but fixed distribution after `tokens`, every token of the vocabulary."""
    weights = [math.exp(2 * random.Random(repr((tokens, t))).gauss(0, 1)) for t in range(VOCAB)]
    total = sum(weights)
    return {t: Logprob(math.log(w / total)) for t, w in enumerate(weights)}


def search(params: BeamSearchParams, ends: tuple[int, ...], max_steps: int) -> BeamSearchOutput:
    found = BeamSearch(PROMPT, params, ends, max_steps)
    while not found.done:
        assert 1 <= len(found.running) <= params.beam_width
        found.advance([next_logprobs(beam.tokens) for beam in found.running])
    return found.output()


def every_sequence(ends: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    """All continuations that end within `length` tokens, and those of that length: logprobs."""
    scores: dict[tuple[int, ...], float] = {}
    for size in range(1, length + 1):
        for tokens in itertools.product(range(VOCAB), repeat=size):
            if any(t in ends for t in tokens[:-1]) or (size < length and tokens[-1] not in ends):
                continue
            sums = [
                next_logprobs(PROMPT + list(tokens[:i]))[tokens[i]].logprob for i in range(size)
            ]
            scores[tokens] = sum(sums)
    return scores


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("ends", [(END,), (END, OTHER_END)])
def test_a_wide_search_finds_the_best_sequences(penalty: float, ends: tuple[int, ...]) -> None:
    """A beam as wide as the tree misses nothing: the outcome is the true ranking."""
    length, width = 4, VOCAB**4
    params = BeamSearchParams(
        width, length, length_penalty=penalty, include_stop_str_in_output=True
    )
    best = search(params, ends, length).sequences
    truth = every_sequence(ends, length)
    order = sorted(truth, key=lambda tokens: truth[tokens] / len(tokens) ** penalty, reverse=True)
    assert [tuple(s.tokens[len(PROMPT) :]) for s in best] == order
    for sequence, tokens in zip(best, order, strict=True):
        assert sequence.cum_logprob == pytest.approx(truth[tokens])
        assert len(sequence.logprobs) == len(tokens)
        assert sequence.finish_reason == ("stop" if tokens[-1] in ends else "length")
        assert sequence.stop_reason == (OTHER_END if tokens[-1] == OTHER_END in ends else None)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0, -0.5])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_ending_early_changes_nothing(
    penalty: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = BeamSearchParams(width, 9, length_penalty=penalty)
    early = search(params, (END,), 9)
    monkeypatch.setattr(BeamSearch, "_can_improve", lambda self: True)
    late = search(params, (END,), 9)
    assert early == late and len(early.sequences) == width


def test_the_end_token_is_left_out_unless_asked_for() -> None:
    without = search(BeamSearchParams(3, 6), (END,), 6).sequences
    kept = search(BeamSearchParams(3, 6, include_stop_str_in_output=True), (END,), 6).sequences
    assert any(s.finish_reason == "stop" for s in kept)
    for short, full in zip(without, kept, strict=True):
        tail = [END] if full.finish_reason == "stop" else []
        assert short.tokens + tail == full.tokens
        assert short.cum_logprob == full.cum_logprob
        assert len(short.logprobs) == len(short.tokens) - len(PROMPT)


def test_ignore_eos() -> None:
    sequences = search(BeamSearchParams(4, 5, ignore_eos=True), (END,), 5).sequences
    assert {s.finish_reason for s in sequences} == {"length"}
    assert {len(s.tokens) for s in sequences} == {len(PROMPT) + 5}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"temperature": 0.7}, "temperature must be 0 or 1"),
        ({"length_penalty": float("nan")}, "length_penalty must be in"),
        ({"length_penalty": 1e300}, "length_penalty must be in"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false"),
    ],
)
def test_bad_parameters(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})
    BeamSearchParams(2, 3, temperature=1.0)
