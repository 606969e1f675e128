# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The lowest logit that top-p keeps where nothing else narrows the vocabulary.

A nucleus may be most of the vocabulary, so many programs share a row: each pass weighs 15 values
that part a row's bracket in 16, and the next one searches the part that holds the answer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.utils.math_utils import cdiv, next_power_of_2

#: trailing bits that are always zero in the fp32 form of a logit
ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def key_of(x, ZERO_BITS: tl.constexpr):
    """The int32 key of an fp32 value, without the bits that are always zero."""
    bits = x.to(tl.int32, bitcast=True) >> ZERO_BITS
    return bits ^ ((bits >> 31) & (0x7FFFFFFF >> ZERO_BITS))


@triton.jit
def value_of(key, ZERO_BITS: tl.constexpr):
    """The fp32 value of a key."""
    bits = key ^ ((key >> 31) & (0x7FFFFFFF >> ZERO_BITS))
    return (bits << ZERO_BITS).to(tl.float32, bitcast=True)


@triton.jit
def middle_of(low, high):
    """Upper middle of two keys, which may be as far apart as int32 reaches."""
    return ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)


PARTS = 16
TILE = 4096


@triton.jit
def _pivot(low, width, j, high):
    """The j-th of the values that part `[low, high]`, as a key."""
    return tl.minimum(low.to(tl.int64) + j * width, high.to(tl.int64)).to(tl.int32)


@triton.jit
def _weigh_kernel(
    logits_ptr,
    temperature_ptr,
    peak_ptr,
    tile_peak_ptr,
    bracket_ptr,
    part_ptr,
    stride_row,
    VOCAB: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (tiles, rows): the tile's mass from each pivot on."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    low, high = tl.load(bracket_ptr + 2 * row), tl.load(bracket_ptr + 2 * row + 1)
    if low >= high:
        return
    width = tl.cdiv(high.to(tl.int64) - low, PARTS)
    place = row * tl.num_programs(0) + tile
    parts = part_ptr + place * PARTS
    if tl.load(tile_peak_ptr + place) < value_of(_pivot(low, width, 1, high), ZERO_BITS):
        tl.store(parts + tl.arange(0, PARTS), tl.zeros((PARTS,), tl.float32))
        return
    index = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * stride_row + index, mask=index < VOCAB, other=float("-inf"))
    x = x.to(tl.float32)
    mass = tl.exp((x - tl.load(peak_ptr + row)) / tl.load(temperature_ptr + row))
    for j in tl.static_range(1, PARTS):
        pivot = value_of(_pivot(low, width, j, high), ZERO_BITS)
        tl.store(parts + j, tl.sum(tl.where(x >= pivot, mass, 0.0), axis=0))


@triton.jit
def _narrow_kernel(
    part_ptr,
    target_ptr,
    bracket_ptr,
    lowest_ptr,
    TILES: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows): the part of the bracket whose lower end reaches the target, the upper not."""
    row = tl.program_id(0).to(tl.int64)
    low, high = tl.load(bracket_ptr + 2 * row), tl.load(bracket_ptr + 2 * row + 1)
    if low >= high:
        return
    width = tl.cdiv(high.to(tl.int64) - low, PARTS)
    t, j = tl.arange(0, BLOCK), tl.arange(0, PARTS)
    inside = (t < TILES)[:, None] & (j > 0)[None, :]
    place = (row * TILES + t)[:, None] * PARTS + j[None, :]
    mass = tl.sum(tl.load(part_ptr + place, mask=inside, other=0.0), axis=0)
    reached = (mass >= tl.load(target_ptr + row)) & (j > 0)
    best = tl.max(tl.where(reached, j, 0), axis=0)
    found = _pivot(low, width, best, high)
    after = low.to(tl.int64) + (best + 1) * width - 1
    above = tl.where(best == PARTS - 1, high.to(tl.int64), tl.minimum(after, high.to(tl.int64)))
    tl.store(bracket_ptr + 2 * row, found)
    tl.store(bracket_ptr + 2 * row + 1, above.to(tl.int32))
    tl.store(lowest_ptr + row, value_of(found, ZERO_BITS))


def search_mass(
    logits: Tensor,
    temperature: Tensor,
    peaks: Tensor,
    tile_peaks: Tensor,
    target: Tensor,
    bracket: Tensor,
    lowest: Tensor,
) -> None:
    """Narrow every row's `bracket [n, 2]` (int32 keys, ends included) to one key: the largest from
    which on the mass reaches `target [n]`, relative to the row's peak; its value goes to `lowest
    [n]`. Rows whose ends are equal are left alone.

    `logits [n, vocab]`, `temperature, peaks [n]` and `tile_peaks [n, tiles]` fp32, per `TILE`.
    """
    rows, vocab = logits.shape
    tiles, zero_bits = tile_peaks.shape[1], ZERO_BITS[logits.dtype]
    parts = torch.empty(rows, tiles, PARTS, dtype=torch.float32, device=logits.device)
    for _ in range(cdiv(32 - zero_bits, PARTS.bit_length() - 1)):
        _weigh_kernel[(tiles, rows)](
            logits,
            temperature,
            peaks,
            tile_peaks,
            bracket,
            parts,
            logits.stride(0),
            VOCAB=vocab,
            ZERO_BITS=zero_bits,
            PARTS=PARTS,
            TILE=TILE,
        )
        _narrow_kernel[(rows,)](
            parts,
            target,
            bracket,
            lowest,
            TILES=tiles,
            ZERO_BITS=zero_bits,
            PARTS=PARTS,
            BLOCK=next_power_of_2(tiles),
        )
