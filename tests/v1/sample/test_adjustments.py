# SPDX-License-Identifier: Apache-2.0
"""Biases, masks, penalties, banned words and minimum length."""

from __future__ import annotations

import math

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.adjustments import Adjustments

CPU = torch.device("cpu")
VOCAB = 10


def _make(params: SamplingParams, prompt: list[int], output: list[int]) -> Adjustments:
    tokens = np.array(prompt + output, dtype=np.int64)
    return Adjustments(params, tokens, len(prompt), VOCAB, CPU)


def _applied(adjustments: Adjustments, logits: torch.Tensor, num_output: int) -> torch.Tensor:
    changed = logits.clone()
    adjustments.apply(changed, adjustments.num_prompt_tokens + num_output)
    return changed


def _observe(adjustments: Adjustments, *tokens: int) -> None:
    for token in tokens:
        adjustments.observe(torch.tensor([token]))


def test_plain_requests_need_nothing() -> None:
    assert not Adjustments.needed(SamplingParams(temperature=0.7, top_p=0.5))
    assert Adjustments.needed(SamplingParams(min_tokens=1))
    assert Adjustments.needed(SamplingParams(presence_penalty=0.1))


def test_bias_and_allowed_tokens() -> None:
    params = SamplingParams(logit_bias={2: 5.0, 3: -1.0}, allowed_token_ids=[2, 4])
    out = _applied(_make(params, [1], []), torch.zeros(VOCAB), 0)
    assert out[2] == 5.0 and out[4] == 0.0
    assert all(out[i] == -math.inf for i in range(VOCAB) if i not in (2, 4))


def test_minimum_length_bars_every_stop_token() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[3])
    params.eos_token_ids = [7]
    adjustments = _make(params, [1], [])
    for produced, barred in ((0, True), (1, True), (2, False)):
        out = _applied(adjustments, torch.zeros(VOCAB), produced)
        assert [bool(out[i] == -math.inf) for i in (3, 7)] == [barred, barred]
        assert torch.isfinite(out[[0, 1, 2]]).all()


def test_penalties_follow_the_published_formulas() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    adjustments = _make(params, [0, 1], [])
    _observe(adjustments, 2, 2, 3)
    logits = torch.full((VOCAB,), 1.0)
    logits[1] = -1.0
    out = _applied(adjustments, logits, 3)
    assert out[0] == 0.5  # in the prompt, positive: divided
    assert out[1] == -2.0  # in the prompt, negative: multiplied
    assert out[2] == 0.5 - 2 * 0.5 - 0.25
    assert out[3] == 0.5 - 0.5 - 0.25
    assert out[4] == 1.0


def test_a_resumed_request_counts_its_earlier_output() -> None:
    params = SamplingParams(frequency_penalty=1.0, bad_words=["x"])
    params.bad_words_token_ids = [[4, 5]]
    resumed, lived = _make(params, [1], [4, 4]), _make(params, [1], [])
    _observe(lived, 4, 4)
    logits = torch.randn(VOCAB)
    assert torch.equal(_applied(resumed, logits, 2), _applied(lived, logits, 2))


def test_a_banned_word_is_stopped_at_its_last_token() -> None:
    params = SamplingParams(bad_words=["x"])
    params.bad_words_token_ids = [[9], [1, 2, 3]]
    adjustments = _make(params, [1, 2], [])
    out = _applied(adjustments, torch.zeros(VOCAB), 0)
    assert out[9] == -math.inf
    assert out[3] == 0.0, "the prompt does not count as output"
    _observe(adjustments, 1)
    assert _applied(adjustments, torch.zeros(VOCAB), 1)[3] == 0.0
    _observe(adjustments, 2)
    assert _applied(adjustments, torch.zeros(VOCAB), 2)[3] == -math.inf
    _observe(adjustments, 2)
    assert _applied(adjustments, torch.zeros(VOCAB), 3)[3] == 0.0


def test_words_of_any_lengths_cost_their_tokens() -> None:
    """Two thousand short words and a long one, which dense rows would pad to its length."""
    params, long = SamplingParams(), [5, 6] * 10_000
    params.bad_words_token_ids = [[i % 10, (i * 7) % 9] for i in range(2000)] + [[*long, 7]]
    adjustments = _make(params, [1], long)
    assert adjustments.words is not None
    assert len(adjustments.words.ids) == 2 * 2000 + len(long) + 1
    begun = {word[-1] for word in params.bad_words_token_ids if word[:-1] in ([6], long)}
    out = _applied(adjustments, torch.zeros(VOCAB), len(long))
    assert {i for i in range(VOCAB) if out[i] == -math.inf} == begun and 7 in begun
    _observe(adjustments, 9)
    assert 9 == adjustments.words.recent[-1] and len(adjustments.words.recent) == len(long)


def test_no_token_counts_nowhere() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    params.bad_words_token_ids = [[1, 2]]
    adjustments = _make(params, [1], [])
    before = _applied(adjustments, torch.zeros(VOCAB), 0)
    _observe(adjustments, -1)
    assert torch.equal(_applied(adjustments, torch.zeros(VOCAB), 1), before)
