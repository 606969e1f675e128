# SPDX-License-Identifier: Apache-2.0
"""Verified tokens have the target's distribution, whatever is proposed: a chi-square test of
`accept` and drafts over a Markov chain, whose transitions are known exactly.

Noise is a function of row and position, as the sampler's is (which has tests of its own), but from
tables. `VLLM_TEST_LAW_TOKENS=1000000` takes more tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.chi_square import BOUND, deviation
from tests.nightly import nightly
from vllm.kernels.ngram import LookupProblem, look_up
from vllm.kernels.step import AcceptProblem, Progress, accept

VOCAB, WIDTH, LENGTH, CPU = 6, 4, 100, torch.device("cpu")
NUM_TOKENS = int(os.environ.get("VLLM_TEST_LAW_TOKENS", "200000"))


@dataclass
class Chain:
    """Rows that decode: logits follow from the token before alone."""

    logits: Tensor
    rows: int
    progress: Progress
    #: `[2, rows, positions, vocab]`: the target's, and another
    noise: Tensor
    history: Tensor

    @classmethod
    def start(cls, rows: int, seed: int = 0) -> Chain:
        draws = torch.Generator().manual_seed(seed)
        logits = torch.randn(VOCAB, VOCAB, generator=draws)
        progress = Progress.create(rows, WIDTH, CPU)
        progress.computed.fill_(1)
        shape = (2, rows, LENGTH + 3 * WIDTH, VOCAB)
        noise = -torch.empty(shape).exponential_(generator=draws).log()
        history = torch.zeros(rows, LENGTH + 2 * WIDTH, dtype=torch.int64)
        return cls(logits, rows, progress, noise, history)

    def draw(self, logits: Tensor, positions: Tensor, table: int = 0) -> Tensor:
        """`logits [rows, n, vocab]`, `positions [rows, n]` -> tokens `[rows, n]`."""
        places = positions.clamp(max=self.noise.shape[2] - 1)[..., None].expand(-1, -1, VOCAB)
        return (logits + self.noise[table].gather(1, places)).argmax(-1)

    def positions(self) -> Tensor:
        """`[rows, width]`: of the tokens that follow the newest and each draft."""
        return self.progress.computed.long()[:, None] + torch.arange(1, WIDTH + 1)


Drafter = Callable[[Chain], None]


def fixed(chain: Chain) -> None:
    chain.progress.tokens[:, 1:] = 2
    chain.progress.num_drafts.fill_(WIDTH - 1)


def _drawn(chain: Chain, table: int) -> None:
    """From another distribution than the target's, as a draft model does."""
    tokens, positions = chain.progress.tokens, chain.positions()
    for j in range(1, WIDTH):
        logits = 0.7 * chain.logits[tokens[:, j - 1 : j]] + torch.linspace(0, 1, VOCAB)
        tokens[:, j : j + 1] = chain.draw(logits, positions[:, j - 1 : j], table)
    chain.progress.num_drafts.fill_(WIDTH - 1)


def own_noise(chain: Chain) -> None:
    _drawn(chain, 1)


def the_targets_noise(chain: Chain) -> None:
    _drawn(chain, 0)


def greedy(chain: Chain) -> None:
    for j in range(1, WIDTH):
        chain.progress.tokens[:, j] = chain.logits[chain.progress.tokens[:, j - 1]].argmax(-1)
    chain.progress.num_drafts.fill_(WIDTH - 1)


class Ngram:
    """Looks up what the chain has sampled."""

    def __init__(self, rows: int) -> None:
        self.history = torch.zeros(rows, LENGTH + 4 * WIDTH, dtype=torch.int32)
        self.lengths = torch.ones(rows, dtype=torch.int32)

    def take(self, chain: Chain, requests: Tensor, sampled: Tensor, counts: Tensor) -> None:
        progress = chain.progress
        look_up(
            LookupProblem(
                history=self.history,
                lengths=self.lengths,
                requests=requests,
                sampled=sampled,
                counts=counts,
                tokens=progress.tokens,
                drafts=progress.num_drafts,
                best=torch.zeros(chain.rows, dtype=torch.int64),
                least=1,
                most=3,
                num_drafts=WIDTH - 1,
            )
        )


def transitions(
    drafter: Drafter | None, num_tokens: int, bias: float = 0.0, ngram: bool = False
) -> tuple[Chain, Tensor, float]:
    """`[vocab, vocab]` counts of the first `LENGTH` tokens of every row, and tokens per step;
    `bias`: share of the samples that are replaced by the draft they are to verify."""
    rows = num_tokens // LENGTH
    chain = Chain.start(rows)
    lookup = Ngram(rows) if ngram else None
    planted = torch.Generator().manual_seed(5)
    first = torch.arange(rows, dtype=torch.int32)
    requests = torch.stack([first, first * WIDTH, first * 0 + WIDTH, first * 0], dim=1)
    found = torch.zeros(rows, dtype=torch.int64)
    steps = 0
    while int(found.min()) < LENGTH:
        if drafter is not None:
            drafter(chain)
        sampled = chain.draw(chain.logits[chain.progress.tokens], chain.positions())
        if bias:
            wrong = torch.rand(rows, WIDTH - 1, generator=planted) < bias
            sampled[:, :-1] = torch.where(wrong, chain.progress.tokens[:, 1:], sampled[:, :-1])
        verified = torch.zeros(2, rows, dtype=torch.int32)
        accept(AcceptProblem(chain.progress, requests, sampled.flatten(), verified))
        counts = verified[0].long()
        chain.progress.computed.add_(1)
        for j in range(WIDTH):
            taken = (j < counts) & (found + j < LENGTH)
            chain.history[taken, 1 + found[taken] + j] = sampled[taken, j]
        found += counts
        steps += 1
        if lookup is not None:
            lookup.take(chain, requests, sampled.flatten(), verified[0])
    tokens = chain.history[:, : LENGTH + 1]
    pairs = tokens[:, :-1] * VOCAB + tokens[:, 1:]
    table = torch.bincount(pairs.flatten(), minlength=VOCAB**2).view(VOCAB, VOCAB)
    return chain, table, float(found.sum()) / (steps * rows)


DRAFTERS: list[Drafter | None] = [None, fixed, greedy, own_noise, the_targets_noise]


@pytest.mark.parametrize("num_tokens", [NUM_TOKENS, *nightly(1_000_000)])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.__name__ if d else "none")
def test_tokens_have_the_targets_law(drafter: Drafter | None, num_tokens: int) -> None:
    chain, table, per_step = transitions(drafter, num_tokens)
    assert abs(deviation(chain.logits, table)) < BOUND
    assert (per_step > 1.1) == (drafter is not None)


def test_looked_up_tokens_have_the_targets_law() -> None:
    chain, table, per_step = transitions(None, NUM_TOKENS // 8, ngram=True)
    assert abs(deviation(chain.logits, table)) < BOUND and per_step > 1.1


def test_sharing_the_targets_noise_accepts_more() -> None:
    own, shared = (transitions(d, 20_000)[2] for d in (own_noise, the_targets_noise))
    assert shared > own + 0.2


@pytest.mark.parametrize("drafter", [fixed, *nightly(greedy)])
def test_a_bias_of_one_percent_is_noticed(drafter: Drafter) -> None:
    """One draft in a hundred is taken for the sample it should have been compared with. (Drafts of
    nearly the target's law would bias it too little for these numbers of tokens.)"""
    chain, table, _ = transitions(drafter, NUM_TOKENS if drafter is fixed else 1_000_000, bias=0.01)
    assert abs(deviation(chain.logits, table)) > BOUND


def test_drafts_change_no_token() -> None:
    """The same noise samples the same tokens: more than the same law."""
    plain, drafted = (transitions(d, 20_000)[0] for d in (None, own_noise))
    assert torch.equal(plain.history[:, : LENGTH + 1], drafted.history[:, : LENGTH + 1])
