# SPDX-License-Identifier: Apache-2.0
"""Masks on logits: every bit, and their place among the sampler's other steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import NO_TOKEN
from vllm.v1.sample.adjusted_rows import AdjustedRow, HostRows
from vllm.v1.sample.adjustments import Adjustments
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import gather_logprobs, sample
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.structured_output.mask_words import FilledMasks, num_mask_words, pack_tokens

CPU = torch.device("cpu")


def masks_for(rows: dict[int, list[int]], vocab: int) -> TokenMasks:
    words = torch.stack([torch.from_numpy(pack_tokens(t, vocab)) for t in rows.values()])
    return TokenMasks(torch.tensor(list(rows)), words)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab, dtype=dtype)
    rows = {3: sorted({0, vocab - 1}), 1: list(range(0, vocab, 3))}
    expected = logits.clone()
    for row, tokens in rows.items():
        for token in set(range(vocab)) - set(tokens):
            expected[row, token] = float("-inf")
    masks_for(rows, vocab).apply(logits)
    assert torch.equal(logits, expected)


def test_dummy_allows_all() -> None:
    logits = torch.randn(3, 70)
    before = logits.clone()
    TokenMasks.dummy(logits, logits.shape[1]).apply(logits)
    assert torch.equal(logits, before)


def test_upload_finds_the_rows() -> None:
    """Those after a request's drafts follow its first."""
    words = torch.arange(6 * num_mask_words(40), dtype=torch.int32).reshape(6, -1)
    filled = FilledMasks(words.numpy(), [1, 3, 2])
    masks = TokenMasks.upload(filled, np.array([1, 4, 8]), CPU)
    assert masks.rows.tolist() == [1, 4, 5, 6, 8, 9] and torch.equal(masks.words, words)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_only_allowed_tokens_are_sampled(temperature: float, logprobs: int | None) -> None:
    vocab, n = 50, 40
    params = SamplingParams(temperature=temperature, seed=3, top_k=5, logprobs=logprobs)
    metadata = SamplingMetadata.build([params] * n, vocab, CPU)
    logits = torch.randn(n, vocab)
    raw = logits.clone()
    rows = {row: [row % vocab, (row + 7) % vocab] for row in range(0, n, 2)}
    result = sample(logits, metadata, torch.arange(n), None, masks_for(rows, vocab))
    tokens = result.sampled_token_ids.tolist()
    assert all(tokens[row] in allowed for row, allowed in rows.items())
    free = sample(raw.clone(), metadata, torch.arange(n)).sampled_token_ids.tolist()
    assert [tokens[row] for row in range(1, n, 2)] == free[1::2]
    if logprobs is not None:
        assert result.logprobs is not None
        expected = gather_logprobs(raw, result.sampled_token_ids, logprobs)
        assert torch.equal(result.logprobs.logprobs, expected.logprobs)


def test_adjustments_do_not_lift_a_mask() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={4: 100.0}, repetition_penalty=0.5)
    adjustment = Adjustments(params, torch.tensor([4, 5]).numpy(), 2, 10, CPU)
    metadata = SamplingMetadata.build([params], 10, CPU)
    logits = torch.zeros(1, 10)
    masks = masks_for({0: [2, 3]}, 10)
    result = sample(
        logits, metadata, torch.tensor([0]), HostRows([AdjustedRow(0, adjustment, 0)]), masks
    )
    assert result.sampled_token_ids.item() in (2, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("top_k", [0, 1])
def test_a_mask_does_not_lift_a_ban(temperature: float, top_k: int) -> None:
    """All that the grammar allows is banned: nothing is sampled, for the scheduler to end it."""
    banned = [0, 3]
    params = SamplingParams(temperature=temperature, seed=1, top_k=top_k, top_p=0.9, min_p=0.1)
    params.bad_words_token_ids = [[token] for token in banned]
    adjustment = Adjustments(params, torch.tensor([1]).numpy(), 1, 10, CPU)
    metadata = SamplingMetadata.build([params], 10, CPU)
    positions, masks = torch.tensor([0]), masks_for({0: banned}, 10)
    result = sample(
        torch.randn(1, 10), metadata, positions, HostRows([AdjustedRow(0, adjustment, 0)]), masks
    )
    assert result.sampled_token_ids.item() == NO_TOKEN


def test_a_grammar_decides_about_stop_tokens_below_min_tokens() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=0.0,
        min_tokens=5,
        stop_token_ids=[3],
        structured_outputs=StructuredOutputsParams(regex="a"),
    )
    adjustment = Adjustments(params, torch.tensor([1]).numpy(), 1, 10, CPU)
    logits = torch.zeros(10)
    adjustment.apply(logits, 1)
    assert logits[3] == 0
