# SPDX-License-Identifier: Apache-2.0
"""Which attention to latents `vllm_cuda` takes, and into how many shares it cuts keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases import latent_case
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.latent_attention.hopper import (
    LATENT,
    MAX_SHARES,
    SHARE_KEYS,
    SHARED_NUMBERS,
    num_shares,
    takes_latents,
)

BF16 = torch.bfloat16
CHIP = 132
ROW = 32 * LATENT  # numbers of a token's output


def problem(
    size: tuple[int, ...] = (4, 128, 64, 128, 512),
    dtype: torch.dtype = BF16,
    lengths: tuple[tuple[int, int], ...] = ((1, 20), (1, 5)),
    **options: Any,
) -> LatentAttentionProblem:
    return LatentAttentionProblem(**latent_case(list(lengths), size, dtype, "cpu", **options))


@pytest.mark.parametrize(
    "taken",
    [
        pytest.param(problem(), id="decode"),
        pytest.param(problem(lengths=((7, 20),)), id="several queries"),
        pytest.param(problem((3, 96, 64, 80, 512)), id="other heads"),
        pytest.param(problem(block_size=48), id="blocks of 48"),
    ],
)
def test_what_is_taken(taken: LatentAttentionProblem) -> None:
    assert takes_latents(taken)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(problem(dtype=torch.float16), id="fp16"),
        pytest.param(problem((4, 128, 32, 128, 512)), id="fewer shared dimensions"),
        pytest.param(problem((4, 128, 64, 128, 256)), id="shorter latents"),
        pytest.param(problem((4, 132, 64, 128, 512)), id="rows that are not at 16 bytes"),
        pytest.param(problem(block_size=24), id="blocks of 24"),
    ],
)
def test_what_is_not(other: LatentAttentionProblem) -> None:
    assert not takes_latents(other)


@pytest.mark.parametrize(
    ("seqs", "longest", "shares"),
    [
        (64, 4096, 2),  # fills the chip once
        (64, 16384, 2),
        (1, 16384, MAX_SHARES),
        (1, SHARE_KEYS, 1),
        (132, 4096, 1),
        (256, 4096, 1),  # nearly fills it twice
        (100, 16384, 5),  # 500 shares of a fifth in 4 turns, not 100 whole ones in one
    ],
)
def test_shares(seqs: int, longest: int, shares: int) -> None:
    assert num_shares(seqs, longest, seqs * ROW, CHIP) == shares


@pytest.mark.parametrize("seqs", [1, 7, 64, 100, 500])
@pytest.mark.parametrize("longest", [1, 300, 5000, 10**6])
def test_shares_have_keys_and_room(seqs: int, longest: int) -> None:
    shares = num_shares(seqs, longest, seqs * ROW, CHIP)
    assert 1 <= shares <= MAX_SHARES
    assert shares == 1 or (shares - 1) * SHARE_KEYS < longest
    assert shares == 1 or shares * seqs * ROW <= SHARED_NUMBERS
