# SPDX-License-Identifier: Apache-2.0
"""Drawing from a softmax by the Gumbel-max trick, with counter-based noise.

The noise of a draw depends on the request's seed and the token's position alone: never on the
batch, the schedule or a preemption, so any draw can be repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.v1.outputs import NO_TOKEN

_MASK = (1 << 64) - 1


def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample one token per row -> `[n]` int64, `NO_TOKEN` where there is none.

    `logits [n, vocab]` fp32, already divided by the temperature and filtered; `temperature [n]`
    fp32, rows with 0 take the argmax; `seeds, positions [n]` int64.
    """
    noisy = logits.clone()
    rows = zip(temperature.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    for row, (row_temperature, seed, position) in enumerate(rows):
        if row_temperature > 0:
            noisy[row] += _noise(seed, position, logits.shape[1])
    return best_tokens(noisy)


def best_tokens(scores: Tensor) -> Tensor:
    """The first of each row's largest `scores [n, vocab]` -> `[n]` int64; `NO_TOKEN` where all are
    -inf or some are NaN."""
    best, tokens = scores.max(dim=-1)
    return tokens.masked_fill_(~(best > float("-inf")), NO_TOKEN)


def _noise(seed: int, position: int, size: int) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(_mix(seed, position))
    return -torch.empty(size).exponential_(generator=generator).log()


def _mix(seed: int, position: int) -> int:
    """SplitMix64 finaliser over (seed, position): neighbours in either get unrelated streams."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & ((1 << 63) - 1)
