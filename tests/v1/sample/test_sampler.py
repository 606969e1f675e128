# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens: filters against brute force, frequencies, repeatability, logprobs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vllm.kernels.sampling.naive import apply_min_p, apply_top_k_top_p, gumbel_sample
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import gather_logprobs, sample

CPU = torch.device("cpu")


def _kept(logits: Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row > -math.inf).flatten().tolist()) for row in logits]


def _metadata(*params: SamplingParams, vocab: int = 50) -> SamplingMetadata:
    return SamplingMetadata.build(list(params), vocab, CPU)


def test_top_k_top_p_keep_the_sets_of_their_definition() -> None:
    logits = torch.randn(20, 50)
    top_k = torch.randint(1, 51, (20,))
    top_p = torch.rand(20) * 0.98 + 0.01
    kept = _kept(apply_top_k_top_p(logits, top_k, top_p))
    for row, k, p, got in zip(logits, top_k.tolist(), top_p.tolist(), kept, strict=True):
        order = row.argsort(descending=True).tolist()[:k]
        probs = row[order].softmax(0)
        mass, expected = 0.0, set()
        for token, prob in zip(order, probs.tolist(), strict=True):
            if mass >= p and expected:
                break
            expected.add(token)
            mass += prob
        assert got == expected


def test_top_p_of_one_token_keeps_it() -> None:
    logits = torch.tensor([[0.0, 10.0, 0.0]])
    assert _kept(apply_top_k_top_p(logits, None, torch.tensor([1e-6]))) == [{1}]


def test_min_p_is_relative_to_the_likeliest() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    assert _kept(apply_min_p(probs.log(), torch.tensor([0.25]))) == [{0, 1, 2}]


def test_frequencies_follow_the_softmax() -> None:
    probs = torch.tensor([0.6, 0.3, 0.1])
    n = 6000
    logits = probs.log().expand(n, 3)
    drawn = gumbel_sample(logits, torch.ones(n), torch.full((n,), 7), torch.arange(n))
    counts = drawn.bincount(minlength=3) / n
    torch.testing.assert_close(counts, probs, rtol=0, atol=0.03)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(1, 1000).expand(4, 1000)
    seeds, positions = torch.tensor([3, 3, 4, 3]), torch.tensor([10, 11, 10, 10])
    drawn = gumbel_sample(logits, torch.ones(4), seeds, positions).tolist()
    assert drawn[0] == drawn[3]
    assert len(set(drawn[:3])) == 3
    alone = gumbel_sample(logits[2:3], torch.ones(1), seeds[2:3], positions[2:3]).tolist()
    assert alone == drawn[2:3]


def test_greedy_rows_among_random_ones() -> None:
    logits = torch.randn(3, 50)
    greedy = SamplingParams(temperature=0.0)
    drawn = sample(
        logits.clone(),
        _metadata(greedy, SamplingParams(temperature=2.0, seed=1), greedy),
        torch.tensor([5, 5, 5]),
    ).sampled_token_ids
    assert drawn[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()


def test_temperature_sharpens() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(400, 3)
    cold = [SamplingParams(temperature=0.05, seed=i) for i in range(400)]
    drawn = sample(logits.clone(), _metadata(*cold, vocab=3), torch.arange(400))
    assert drawn.sampled_token_ids.eq(0).all()


def test_metadata_leaves_unused_features_out() -> None:
    metadata = _metadata(SamplingParams(temperature=0.0, logprobs=3), SamplingParams(temperature=0))
    assert metadata.temperature is None and metadata.seeds is None
    assert metadata.num_logprobs == 3
    random_row = _metadata(SamplingParams(seed=1, top_p=0.5), SamplingParams(temperature=0.0))
    assert random_row.top_k is None and random_row.min_p is None
    assert random_row.top_p is not None
    # The greedy row's filter is off whatever the request said.
    assert random_row.top_p.tolist() == [0.5, 1.0]


def test_metadata_tells_rows_that_limit_mass_alone() -> None:
    def alone(**kwargs: float) -> bool:
        greedy = SamplingParams(temperature=0.0, top_p=0.5)
        return _metadata(greedy, SamplingParams(seed=1, **kwargs)).top_p_alone  # type: ignore[arg-type]

    assert alone(top_p=0.5) and alone(top_p=0.5, top_k=50)
    assert not alone() and not alone(top_p=0.5, top_k=5) and not alone(top_p=0.5, min_p=0.1)


def test_top_p_of_one_keeps_all_whatever_the_others_ask() -> None:
    logits = 3 * torch.randn(1, 9000, generator=torch.Generator().manual_seed(0)).expand(2, 9000)
    probs = logits[0].sort(descending=True).values.softmax(0)
    assert (probs.cumsum(0) - probs >= 1).any(), "rounded, the mass before some tokens is 1"
    kept = _kept(apply_top_k_top_p(logits, None, torch.tensor([1.0, 0.5])))
    assert len(kept[0]) == 9000


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 1.0, 0.0, 1.0]])
    by_rank = apply_top_k_top_p(logits, torch.tensor([3]), None)
    by_mass = apply_top_k_top_p(logits, None, torch.tensor([0.8]))
    assert _kept(by_rank) == _kept(by_mass) == [{0, 1, 2, 3, 5}]


def test_a_seed_is_required() -> None:
    with pytest.raises(ValueError, match="without a seed"):
        _metadata(SamplingParams(temperature=1.0))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -5])
def test_every_64_bit_seed_is_accepted(seed: int) -> None:
    metadata = _metadata(SamplingParams(temperature=1.0, seed=seed))
    assert metadata.seeds is not None and metadata.seeds.dtype == torch.int64


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(2, 50)
    metadata = _metadata(
        SamplingParams(temperature=2.0, top_k=1, seed=0, logprobs=4),
        SamplingParams(temperature=0.0, logprobs=0),
    )
    output = sample(logits.clone(), metadata, torch.tensor([0, 0]))
    expected = logits.log_softmax(-1)
    assert output.logprobs is not None
    assert output.logprobs.token_ids.shape == (2, 5)
    assert output.logprobs.token_ids[:, 0].tolist() == output.sampled_token_ids.tolist()
    torch.testing.assert_close(
        output.logprobs.logprobs, expected.gather(1, output.logprobs.token_ids.long())
    )


def test_ranks_count_from_one() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]]).expand(4, 4)
    ranks = gather_logprobs(logits, torch.arange(4), 0).ranks
    assert ranks.tolist() == [1, 3, 2, 4]
