# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The lowest logit that top-k, top-p and min-p keep, without sorting the vocabulary.

All three keep the tokens from some logit on, so a row's filters come down to one number. One pass
takes the maximum of every group of `GROUP` tokens. The k-th largest of those bounds the k-th
largest logit from below, and only groups that reach the bound can hold a token that is kept: a
bisection over the values themselves, exact to the bit, then reads those few groups alone. Only
top-p on its own may keep most of the vocabulary: see `mass_search`.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.sampling.mass_search import (
    TILE,
    ZERO_BITS,
    key_of,
    middle_of,
    search_mass,
    value_of,
)
from vllm.utils.math_utils import cdiv, next_power_of_2

GROUP = 64
TILE_GROUPS = 64


@triton.jit
def _summary_kernel(
    logits_ptr,
    temperature_ptr,
    group_ptr,
    peak_ptr,
    mass_ptr,
    stride_row,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (tiles, rows): the maxima of the tile's groups, its own and its mass below that."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * stride_row + index, mask=index < VOCAB, other=float("-inf"))
    x = x.to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    top = tl.max(tl.reshape(x, [TILE // GROUP, GROUP]), axis=1)
    tl.store(group_ptr + row * GROUPS + group, top, mask=group < GROUPS)
    peak = tl.max(top, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    place = row * tl.num_programs(0) + tile
    tl.store(peak_ptr + place, peak)
    tl.store(mass_ptr + place, tl.sum(tl.exp((x - shift) * inverse), axis=0))


@triton.jit
def _measure(
    logits, list_ptr, active, pivot, peak, inverse,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """`(tokens, mass)` of the logits `>= pivot` in the listed groups, the peak's mass being 1."""
    count = 0
    mass = 0.0
    for start in range(0, active, TILE_GROUPS):
        i = start + tl.arange(0, TILE_GROUPS)
        group = tl.load(list_ptr + i, mask=i < active, other=0)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        there = (i < active)[:, None] & (token < VOCAB)
        x = tl.load(logits + token, mask=there, other=float("-inf")).to(tl.float32)
        kept = (x >= pivot) & there
        count += tl.sum(tl.sum(kept.to(tl.int32), axis=1), axis=0)
        share = tl.where(kept, tl.exp((x - peak) * inverse), 0.0)
        mass += tl.sum(tl.sum(share, axis=1), axis=0)
    return count, mass


@triton.jit
def _lowest_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    group_ptr,
    peak_ptr,
    mass_ptr,
    list_ptr,
    lowest_ptr,
    row_peak_ptr,
    bracket_ptr,
    target_ptr,
    stride_row,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    ALONE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Grid (rows): `low` is kept throughout, every logit above `high` is a candidate."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride_row
    temperature = tl.load(temperature_ptr + row)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    g = tl.arange(0, BLOCK_G)
    top = tl.load(group_ptr + row * GROUPS + g, mask=g < GROUPS, other=float("-inf"))
    peak = tl.max(top, axis=0)
    k = tl.load(top_k_ptr + row).to(tl.int32)
    p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    floor = tl.where(min_p > 0, peak + tl.log(min_p) * temperature, float("-inf"))
    low = key_of(floor, ZERO_BITS)
    high = key_of(peak, ZERO_BITS)
    if k < VOCAB:
        upper = high
        while low < upper:
            middle = middle_of(low, upper)
            reached = tl.sum((top >= value_of(middle, ZERO_BITS)).to(tl.int32), axis=0) >= k
            low = tl.where(reached, middle, low)
            upper = tl.where(reached, upper, middle - 1)
    t = tl.arange(0, BLOCK_T)
    inside = t < TILES
    tile_peak = tl.load(peak_ptr + row * TILES + t, mask=inside, other=float("-inf"))
    mass = tl.load(mass_ptr + row * TILES + t, mask=inside, other=0.0)
    total = tl.sum(mass * tl.exp((tile_peak - peak) * inverse), axis=0)
    if (p < 1.0) & (k == VOCAB) & (floor == float("-inf")):
        weight = tl.exp((top - peak) * inverse)
        upper = high
        while low < upper:
            middle = middle_of(low, upper)
            at_least = tl.sum(tl.where(top >= value_of(middle, ZERO_BITS), weight, 0.0), axis=0)
            low = tl.where(at_least >= p * total, middle, low)
            upper = tl.where(at_least >= p * total, upper, middle - 1)
        if ALONE:
            tl.store(row_peak_ptr + row, peak)
            tl.store(target_ptr + row, p * total)
            tl.store(bracket_ptr + 2 * row, low)
            tl.store(bracket_ptr + 2 * row + 1, high)
            tl.store(lowest_ptr + row, value_of(low, ZERO_BITS))
            return

    near = (top >= value_of(low, ZERO_BITS)) & (g < GROUPS)
    active = tl.sum(near.to(tl.int32), axis=0)
    groups = list_ptr + row * GROUPS
    tl.store(groups + tl.cumsum(near.to(tl.int32), axis=0) - 1, g, mask=near)
    tl.debug_barrier()
    if k < VOCAB:
        upper = high
        while low < upper:
            middle = middle_of(low, upper)
            count, _ = _measure(
                logits, groups, active, value_of(middle, ZERO_BITS), peak, inverse,
                VOCAB, GROUP, TILE_GROUPS,
            )  # fmt: skip
            low = tl.where(count >= k, middle, low)
            upper = tl.where(count >= k, upper, middle - 1)
    if p < 1.0:
        if (k < VOCAB) | (floor > float("-inf")):
            base = tl.maximum(value_of(low, ZERO_BITS), floor)
            _, total = _measure(
                logits, groups, active, base, peak, inverse, VOCAB, GROUP, TILE_GROUPS
            )
        upper = high
        while low < upper:
            middle = middle_of(low, upper)
            _, mass_here = _measure(
                logits, groups, active, value_of(middle, ZERO_BITS), peak, inverse,
                VOCAB, GROUP, TILE_GROUPS,
            )  # fmt: skip
            low = tl.where(mass_here >= p * total, middle, low)
            upper = tl.where(mass_here >= p * total, upper, middle - 1)
    tl.store(lowest_ptr + row, tl.minimum(tl.maximum(value_of(low, ZERO_BITS), floor), peak))


@dataclass(frozen=True)
class Kept:
    """`lowest [n]` fp32: the smallest logit a row keeps. `tile_peaks [n, tiles]` fp32: the largest
    logit of every `TILE` tokens."""

    lowest: Tensor
    tile_peaks: Tensor


def kept_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    *,
    top_p_alone: bool = False,
) -> Kept:
    """What min-p, then top-k, then top-p keep of `softmax(logits / temperature)`; ties are kept.

    `logits [n, vocab]` of any float dtype up to fp32, `temperature, top_p, min_p [n]` fp32,
    `top_k [n]` int64; vocabulary size, 1 and 0 switch the filters off. The likeliest token is kept
    always. Nothing depends on other rows. `top_p_alone`: a row may use top-p and nothing else; its
    search is then spread over the device (correct without, but in one program).
    """
    rows, vocab = logits.shape
    groups, tiles = cdiv(vocab, GROUP), cdiv(vocab, TILE)
    fp32 = partial(torch.empty, dtype=torch.float32, device=logits.device)
    maxima = fp32(rows, groups)
    peaks, masses = fp32(rows, tiles), fp32(rows, tiles)
    lowest = fp32(rows)
    near = torch.empty(rows, groups, dtype=torch.int32, device=logits.device)
    bracket = torch.zeros(rows, 2, dtype=torch.int32, device=logits.device)
    row_peaks, target = fp32(rows), fp32(rows)
    if rows == 0:
        return Kept(lowest, peaks)
    _summary_kernel[(tiles, rows)](
        logits,
        temperature,
        maxima,
        peaks,
        masses,
        logits.stride(0),
        VOCAB=vocab,
        GROUPS=groups,
        GROUP=GROUP,
        TILE=TILE,
    )
    if top_k is None:
        top_k = torch.full((rows,), vocab, dtype=torch.int64, device=logits.device)
    _lowest_kernel[(rows,)](
        logits,
        temperature,
        top_k,
        fp32(rows).fill_(1.0) if top_p is None else top_p,
        fp32(rows).zero_() if min_p is None else min_p,
        maxima,
        peaks,
        masses,
        near,
        lowest,
        row_peaks,
        bracket,
        target,
        logits.stride(0),
        VOCAB=vocab,
        GROUPS=groups,
        TILES=tiles,
        ZERO_BITS=ZERO_BITS[logits.dtype],
        ALONE=top_p_alone,
        GROUP=GROUP,
        TILE_GROUPS=TILE_GROUPS,
        BLOCK_G=next_power_of_2(groups),
        BLOCK_T=next_power_of_2(tiles),
        num_warps=8,
    )
    if top_p_alone:
        search_mass(logits, temperature, row_peaks, peaks, target, bracket, lowest)
    return Kept(lowest, peaks)
