# SPDX-License-Identifier: Apache-2.0
"""The lowest kept logit against sorting, and draws among kept tokens only."""

import itertools

import pytest
import torch

from tests.nightly import nightly
from vllm.kernels.sampling.draw import gumbel_sample
from vllm.kernels.sampling.filter import TILE, kept_tokens
from vllm.kernels.sampling.naive import apply_min_p, apply_top_k_top_p

pytestmark = pytest.mark.slow

ROWS = 6


def sorted_lowest(logits, temperature, top_k, top_p, min_p):
    """By the sorting filters that the CPU uses."""
    scaled = logits.float() / temperature.unsqueeze(1)
    if min_p is not None:
        scaled = apply_min_p(scaled, min_p)
    kept = apply_top_k_top_p(scaled, top_k, top_p) > float("-inf")
    return logits.float().masked_fill(~kept, float("inf")).amin(1)


def filters(vocab, device):
    """Top-k, top-p and min-p of every row, some of them off."""
    top_k = torch.randint(1, 60, (ROWS,)).clamp(max=vocab)
    top_k[1:4] = vocab
    top_p = torch.rand(ROWS) * 0.98 + 0.01
    top_p[[1, 5]] = 1.0
    min_p = torch.rand(ROWS) * 0.3
    min_p[3:5] = 0.0
    return [x.to(device) for x in (top_k, top_p, min_p)]


@pytest.mark.parametrize(
    "vocab, spread, dtype",
    [
        *nightly((50, 1.0, torch.bfloat16), (TILE + 904, 3.0, torch.float32)),
        (TILE + 904, 3.0, torch.bfloat16),
    ],
)
def test_every_combination_keeps_what_sorting_keeps(vocab, spread, dtype, device):
    logits = (torch.randn(ROWS, vocab + 8) * spread).to(dtype).to(device)[:, :vocab]
    temperature = (torch.rand(ROWS) + 0.3).to(device)
    every = filters(vocab, device)
    for chosen in itertools.product((False, True), repeat=3):
        if not any(chosen):
            continue
        given = [x if use else None for x, use in zip(every, chosen, strict=True)]
        lowest = kept_tokens(logits, temperature, *given).lowest
        # A row that loses nothing may name any logit up to its smallest.
        lowest = torch.maximum(lowest, logits.float().amin(1))
        if given[2] is None:
            assert torch.equal(lowest, sorted_lowest(logits, temperature, *given)), chosen
        else:
            kept = (logits.float() >= lowest.unsqueeze(1)).sum(1)
            expected = sorted_lowest(logits, temperature, *given).unsqueeze(1)
            assert torch.equal(kept, (logits.float() >= expected).sum(1)), chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_spread_search_finds_what_one_program_finds(dtype, device):
    logits = (torch.randn(ROWS, TILE + 904) * 3).to(dtype).to(device)
    logits[0, 7:] = float("-inf")
    temperature = (torch.rand(ROWS) + 0.3).to(device)
    top_k, top_p, _ = filters(TILE + 904, device)
    one = kept_tokens(logits, temperature, top_k, top_p, None)
    spread_out = kept_tokens(logits, temperature, top_k, top_p, None, top_p_alone=True)
    assert torch.equal(one.lowest, spread_out.lowest)


def test_the_spread_search_reaches_every_key(device):
    """Many rows, so that answers lie at the ends of the parts as well; fewer in the interpreter."""
    rows = 32 if device == "cuda" else 16
    logits = torch.randn(rows, 300).bfloat16().to(device)
    one = torch.ones(rows, device=device)
    top_p = torch.linspace(0.02, 0.98, rows, device=device)
    one_program = kept_tokens(logits, one, None, top_p, None)
    spread_out = kept_tokens(logits, one, None, top_p, None, top_p_alone=True)
    assert torch.equal(one_program.lowest, spread_out.lowest)


def test_ties_with_the_last_kept_token_are_kept(device):
    logits = torch.tensor([[3.0, 1.0, 2.0, 1.0, 0.0, 1.0]], device=device).bfloat16()
    one = torch.ones(1, device=device)
    by_rank = kept_tokens(logits, one, torch.tensor([3], device=device), None, None)
    by_mass = kept_tokens(logits, one, None, torch.tensor([0.8], device=device), None)
    assert by_rank.lowest == by_mass.lowest == 1.0


def test_the_likeliest_token_is_kept_always(device):
    logits = torch.randn(4, 700, device=device)
    tiny = torch.full((4,), 1e-7, device=device)
    peaks = logits.amax(1)
    one = torch.ones(4, device=device)
    assert torch.equal(kept_tokens(logits, one, None, tiny, None).lowest, peaks)
    spread_out = kept_tokens(logits, one, None, tiny, None, top_p_alone=True)
    assert torch.equal(spread_out.lowest, peaks)
    assert torch.equal(kept_tokens(logits, one, None, None, one).lowest, peaks)


def test_rows_of_barred_tokens_and_none(device):
    logits = torch.full((2, 5000), float("-inf"), device=device)
    logits[0, 4321] = -5.0
    top_k = torch.tensor([3, 3], device=device)
    lowest = kept_tokens(logits, torch.ones(2, device=device), top_k, None, None).lowest
    assert lowest[0] <= -5.0 and lowest[1] == float("-inf")
    assert kept_tokens(logits[:0], torch.ones(0, device=device), top_k[:0], None, None) is not None


def test_a_row_does_not_depend_on_the_others(device):
    logits = torch.randn(ROWS, 1000, device=device)
    temperature = torch.rand(ROWS, device=device) + 0.5
    top_k, top_p, min_p = filters(1000, device)
    whole = kept_tokens(logits, temperature, top_k, top_p, min_p).lowest
    for i in range(ROWS):
        row = slice(i, i + 1)
        alone = kept_tokens(logits[row], temperature[row], top_k[row], top_p[row], min_p[row])
        assert torch.equal(alone.lowest, whole[row])


def test_draws_come_from_kept_tokens_and_keep_their_noise(device):
    """Filtering is masking: the same seeds draw what they draw from masked logits."""
    rows = 20
    logits = torch.randn(rows, TILE + 10, device=device)
    temperature = torch.rand(rows, device=device) + 1.5
    temperature[3] = 0.0
    seeds, positions = torch.arange(2 * rows, device=device).view(2, rows)
    kept = kept_tokens(logits, temperature, torch.full((rows,), 2, device=device), None, None)
    drawn = gumbel_sample(logits, temperature, seeds, positions, kept)
    masked = logits.masked_fill(logits < kept.lowest.unsqueeze(1), float("-inf"))
    assert torch.equal(drawn, gumbel_sample(masked, temperature, seeds, positions))
    least = logits.gather(1, drawn.unsqueeze(1)).squeeze(1) == kept.lowest
    assert 2 < int(least.sum()) < rows and drawn[3] == logits[3].argmax()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_real_vocabulary(dtype, spread, device):
    logits = (torch.randn(ROWS, 248320) * spread).to(dtype).to(device)
    temperature = (torch.rand(ROWS) + 0.3).to(device)
    top_k, top_p, _ = filters(248320, device)
    for given in ((top_k, None, None), (top_k, top_p, None)):
        lowest = torch.maximum(
            kept_tokens(logits, temperature, *given).lowest, logits.amin(1).float()
        )
        assert torch.equal(lowest, sorted_lowest(logits, temperature, *given))
    lowest = kept_tokens(logits, temperature, None, top_p, None, top_p_alone=True).lowest
    lowest = lowest.unsqueeze(1)
    probs = (logits.double() / temperature.unsqueeze(1).double()).softmax(-1)
    at_least = (probs * (logits >= lowest)).sum(1)
    above = (probs * (logits > lowest)).sum(1)
    assert (at_least >= top_p - 1e-5).all() and (above <= top_p + 1e-5).all()
