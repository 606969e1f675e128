# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Log-probabilities of chosen and likeliest tokens in one pass over the logits.

The `n` likeliest tokens lie in the `n` groups of the largest maxima, so only those are ordered.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.registry import Implementation
from vllm.kernels.sampling.filter import GROUP, TILE
from vllm.utils.math_utils import cdiv, next_power_of_2

#: more top logprobs than this are found by ordering the whole vocabulary
MANY = 256


@triton.jit
def _scan_kernel(
    logits_ptr, chosen_ptr, group_ptr, peak_ptr, mass_ptr, above_ptr, stride_row,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, rows): peak, mass below it, group maxima and tokens above the chosen one."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = tile * TILE + tl.arange(0, TILE)
    logits = logits_ptr + row * stride_row
    chosen = tl.load(logits + tl.load(chosen_ptr + row)).to(tl.float32)
    x = tl.load(logits + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    top = tl.max(tl.reshape(x, [TILE // GROUP, GROUP]), axis=1)
    tl.store(group_ptr + row * GROUPS + group, top, mask=group < GROUPS)
    peak = tl.max(top, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    place = row * tl.num_programs(0) + tile
    tl.store(peak_ptr + place, peak)
    tl.store(mass_ptr + place, tl.sum(tl.exp(x - shift), axis=0))
    tl.store(above_ptr + place, tl.sum((x > chosen).to(tl.int32), axis=0))


@triton.jit
def _finish_kernel(
    peak_ptr, mass_ptr, above_ptr, norm_ptr, rank_ptr, TILES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows): log-sum-exp of the row, and the rank of its chosen token."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    inside = t < TILES
    tile_peak = tl.load(peak_ptr + row * TILES + t, mask=inside, other=float("-inf"))
    mass = tl.load(mass_ptr + row * TILES + t, mask=inside, other=0.0)
    above = tl.load(above_ptr + row * TILES + t, mask=inside, other=0)
    peak = tl.max(tile_peak, axis=0)
    total = tl.sum(mass * tl.exp(tile_peak - peak), axis=0)
    tl.store(norm_ptr + row, peak + tl.log(total))
    tl.store(rank_ptr + row, tl.sum(above, axis=0) + 1)


def _takes(logits: Tensor, chosen: Tensor, num_logprobs: int) -> bool:
    return num_logprobs <= min(MANY, logits.shape[1] // MANY)


def _ranked_logprobs(
    logits: Tensor, chosen: Tensor, num_logprobs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Raises ValueError: the k groups of the likeliest tokens are more than the vocabulary has."""
    rows, vocab = logits.shape
    groups, tiles = cdiv(vocab, GROUP), cdiv(vocab, TILE)
    if num_logprobs > groups:
        raise ValueError(f"{num_logprobs} logprobs of {vocab} tokens: at most {groups}")
    fp32 = partial(torch.empty, dtype=torch.float32, device=logits.device)
    int32 = partial(torch.empty, dtype=torch.int32, device=logits.device)
    maxima, norms = fp32(rows, groups), fp32(rows, 1)
    peaks, masses = fp32(rows, tiles), fp32(rows, tiles)
    above, ranks = int32(rows, tiles), int32(rows)
    if rows:
        _scan_kernel[(tiles, rows)](
            logits, chosen, maxima, peaks, masses, above, logits.stride(0),
            VOCAB=vocab, GROUPS=groups, GROUP=GROUP, TILE=TILE,
        )  # fmt: skip
        block = next_power_of_2(tiles)
        _finish_kernel[(rows,)](peaks, masses, above, norms, ranks, TILES=tiles, BLOCK=block)
    ids = chosen.unsqueeze(1)
    values = logits.gather(1, ids).float()
    if num_logprobs:
        top, top_ids = _likeliest(logits, maxima, num_logprobs)
        ids, values = torch.cat([ids, top_ids], dim=1), torch.cat([values, top], dim=1)
    return ids.int(), values - norms, ranks


def _likeliest(logits: Tensor, maxima: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of every row as fp32, and their tokens; `[n, count]` both."""
    vocab = logits.shape[1]
    near = maxima.topk(count, dim=1, sorted=False).indices
    tokens = (near.unsqueeze(-1) * GROUP + torch.arange(GROUP, device=logits.device)).flatten(1)
    beyond = tokens >= vocab
    tokens = tokens.clamp_(max=vocab - 1)
    values = logits.gather(1, tokens).float().masked_fill_(beyond, float("-inf"))
    top, place = values.topk(count, dim=1)
    return top, tokens.gather(1, place)


ranked_logprobs = Implementation(_ranked_logprobs, _takes)
