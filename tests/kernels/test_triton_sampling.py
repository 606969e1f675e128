# SPDX-License-Identifier: Apache-2.0
"""Triton argmax and Gumbel sampling, against an independent Philox4x32-10."""

import numpy as np
import pytest
import torch

from vllm.kernels.sampling import DrawProblem
from vllm.kernels.sampling.draw import (
    LANE,
    argmax_rows,
    best_draws,
    best_rows,
    first_best,
    gumbel_sample,
)
from vllm.kernels.sampling.filter import kept_tokens
from vllm.v1.outputs import NO_TOKEN


def philox(counter: np.ndarray, position: int, seed: int) -> list[np.ndarray]:
    """Philox4x32-10 of (counter, position low, position high, 0) (Salmon et al., 2011)."""
    mask = np.uint64(0xFFFFFFFF)
    c = [counter.astype(np.uint64)] + [
        np.full(counter.shape, w, np.uint64)
        for w in (position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF, 0)
    ]
    k = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            b & mask,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            a & mask,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def noise(vocab: int, seed: int, position: int) -> torch.Tensor:
    """Gumbel noise of every token in fp64."""
    token = np.arange(vocab)
    outputs = philox(token // (4 * LANE) * LANE + token % LANE, position, seed)
    bits = np.choose(token // LANE % 4, outputs).astype(np.float64)
    return torch.from_numpy(-np.log(-np.log1p(-(bits + 0.5) / 2**32)))


def draw(logits, temperature, seeds, positions):
    device = logits.device
    return gumbel_sample(
        logits,
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(seeds, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
    )


@pytest.mark.parametrize("vocab", [5, 1000, 9001])
def test_argmax(vocab, dtype, device):
    logits = torch.randn(3, vocab + 8).to(dtype).to(device)[:, :vocab]
    logits[1, 2] = logits[1, vocab - 1] = 99.0
    best = argmax_rows(logits)
    assert best.dtype == torch.int64
    assert best[1] == 2, "the first of equals"
    assert torch.equal(logits[range(3), best], logits.max(-1).values)


def test_argmax_of_masked_rows(device):
    logits = torch.full((3, 5000), float("-inf"), device=device)
    logits[0, 4321] = -5.0
    logits[2] = float("nan")
    assert argmax_rows(logits).tolist() == [4321, NO_TOKEN, NO_TOKEN]
    assert argmax_rows(logits[:0]).shape == (0,)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_nothing_is_drawn_where_everything_is_masked(filters, device):
    logits = torch.full((4, 5000), float("-inf"), device=device)
    logits[0, 4321], logits[3, 7] = -5.0, -80.0
    logits[2] = float("nan")
    temperature = torch.tensor([1.0, 0.7, 1.0, 0.0], device=device)
    kept = None
    if filters:
        rows = {name: torch.full((4,), value, device=device) for name, value in filters.items()}
        three = (rows.get(name) for name in ("top_k", "top_p", "min_p"))
        kept = kept_tokens(logits, temperature, *three, top_p_alone="top_p" in filters)
    seeds = torch.arange(4, device=device)
    drawn = gumbel_sample(logits, temperature, seeds, seeds, kept)
    assert drawn.tolist() == [4321, NO_TOKEN, NO_TOKEN, 7]


@pytest.mark.parametrize("seed, position", [(0, 0), (7, 123), (2**63 - 5, 2**33 + 1), (-3, 9)])
def test_gumbel_is_philox_of_seed_position_and_token(seed, position, device):
    logits = torch.randn(1, 9000, device=device)
    expected = (logits[0].cpu().double() / 0.7 + noise(9000, seed, position)).argmax()
    assert draw(logits, [0.7], [seed], [position])[0].cpu() == expected


def test_draws_do_not_depend_on_the_batch(device):
    logits = torch.randn(9, 5000, device=device)
    args = [1.0] * 9, list(range(9)), list(range(100, 109))
    whole = draw(logits, *args)
    for i in (0, 4, 8):
        assert draw(logits[i : i + 1], *(x[i : i + 1] for x in args)) == whole[i : i + 1]


def test_temperature_zero_takes_the_argmax_and_masked_tokens_are_never_drawn(device):
    logits = torch.randn(3, 3000, device=device)
    logits[2, 10:] = float("-inf")
    drawn = draw(logits, [0.0, 1.0, 100.0], [1, 2, 3], [4, 5, 6])
    assert drawn[0] == logits[0].argmax()
    assert drawn[1] != logits[1].argmax()
    assert drawn[2] < 10


def test_frequencies_follow_the_softmax(device):
    """Chi-squared over 4 tokens; 16.3 is the 0.1 % point of 3 degrees."""
    count = 4000 if device == "cuda" else 200
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5], device=device).repeat(count, 1)
    drawn = draw(logits, [2.0] * count, [11] * count, list(range(count))).cpu()
    expected = (logits[0].cpu() / 2.0).softmax(-1) * count
    chi = ((drawn.bincount(minlength=4) - expected).square() / expected).sum()
    assert chi < 16.3


@pytest.mark.parametrize("vocab", [9001, 4096])
@pytest.mark.parametrize("width", [704, 3008])
def test_parts_of_the_vocabulary_tell_what_the_whole_has(vocab, width, dtype, device):
    """Parts begin anywhere within a tile; ties go to the first token, also between parts."""
    torch.manual_seed(0)
    logits = torch.randn(5, vocab).to(dtype).to(device)
    logits[0, [17, 3500]] = logits[0, vocab - 1] = 99.0
    logits[1] = float("-inf")
    logits[2] = float("nan")
    logits[3, : vocab - 1] = float("-inf")
    temperature = torch.tensor([1.0, 1.0, 0.7, 0.0, 1.3], device=device)
    seeds, positions = torch.arange(5, device=device), torch.arange(5, device=device) + 2**33
    starts = range(0, vocab, width)
    told = [best_rows(logits[:, i : i + width], i, vocab) for i in starts]
    found = first_best(torch.stack(told), vocab)
    assert torch.equal(found, argmax_rows(logits))
    assert found[:3].tolist() == [17, NO_TOKEN, NO_TOKEN]
    told = [
        best_draws(DrawProblem(logits[:, i : i + width], temperature, seeds, positions), i, vocab)
        for i in starts
    ]
    drawn = gumbel_sample(logits, temperature, seeds, positions)
    assert torch.equal(first_best(torch.stack(told), vocab), drawn)
    assert first_best(torch.stack(told)[:, :0], vocab).shape == (0,)
