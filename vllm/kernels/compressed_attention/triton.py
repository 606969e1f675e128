# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Compressed attention on GPUs: entries, their choice, and attention.

Grids follow from host integers; what a token sees, and so its bits, from its position.
"""

import triton
import triton.language as tl

from vllm.kernels.compressed_attention import CompressProblem
from vllm.kernels.compressed_attention.triton_attend import (
    compressed_attention as compressed_attention,
)
from vllm.kernels.compressed_attention.triton_choose import choose_entries as choose_entries
from vllm.kernels.compressed_attention.triton_rows import VARYING_NUMBERS, block_of
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import cdiv, next_power_of_2

#: values and scores that a program holds at once
_TILE_ELEMENTS = 4096


@triton.jit
def _blend(value, score, peak, total, acc):
    """The running softmax by channel after a tile `[rows, BLOCK]`; scores of no row are -inf."""
    new_peak = tl.maximum(peak, tl.max(score, axis=0))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp(score - shift[None, :])
    fade = tl.exp(peak - shift)
    return new_peak, total * fade + tl.sum(weight, axis=0), acc * fade + tl.sum(weight * value, 0)


_VARIES = ["table_ptr", "entry_table_ptr", "positions_ptr", "slots_ptr", *VARYING_NUMBERS]


@triton.jit(do_not_specialize=_VARIES)
def _compress_kernel(
    tokens_ptr,
    table_ptr,
    entries_ptr,
    entry_table_ptr,
    positions_ptr,
    slots_ptr,
    weight_ptr,
    cos_sin_ptr,
    eps,
    query_len,
    stride_block,
    stride_table,
    stride_entry_block,
    stride_entry_table,
    columns,
    entry_columns,
    stride_angle,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRY_BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (sequences, entries that a sequence may complete): one entry, in pairs of channels."""
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(positions_ptr + seq * query_len)
    entry = first // RATIO + tl.program_id(1)
    start = entry * RATIO
    # The token that completes it is the step's, at its own place, and stored.
    place = start + RATIO - 1 - first
    inside = place < query_len
    token = seq * query_len + place
    stored = tl.load(slots_ptr + token, mask=inside, other=-1) >= 0
    there = tl.load(positions_ptr + token, mask=inside, other=-1) == start + RATIO - 1
    if (inside & stored & there) == 0:
        return
    block = block_of(
        entry_table_ptr + seq * stride_entry_table, entry, entry_columns, ENTRY_BLOCK_SIZE
    )
    if block <= 0:
        return
    COLUMNS: tl.constexpr = WIDTH * (2 if OVERLAP else 1)
    pair = tl.arange(0, BLOCK_P)
    live = pair < WIDTH // 2
    peak_x = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    peak_y = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    total_x = tl.zeros((BLOCK_P,), tl.float32)
    total_y = tl.zeros((BLOCK_P,), tl.float32)
    x = tl.zeros((BLOCK_P,), tl.float32)
    y = tl.zeros((BLOCK_P,), tl.float32)
    FIRST: tl.constexpr = -RATIO if OVERLAP else 0
    for offset in range(FIRST, RATIO, BLOCK_R):
        step = offset + tl.arange(0, BLOCK_R)
        index = start + step
        held = (step < RATIO) & (index >= 0)
        row_block = block_of(
            table_ptr + seq * stride_table, tl.where(held, index, 0), columns, BLOCK_SIZE
        )
        held &= row_block > 0
        row = tokens_ptr + row_block * stride_block + (index % BLOCK_SIZE) * 2 * COLUMNS
        if OVERLAP:
            # The second half describes a token in its own window.
            row += tl.where(step >= 0, WIDTH, 0)
        mask = held[:, None] & live[None, :]
        at = row[:, None] + 2 * pair[None, :]
        value = tl.load(at, mask=mask, other=0.0)
        score = tl.load(at + COLUMNS, mask=mask, other=float("-inf"))
        peak_x, total_x, x = _blend(value, score, peak_x, total_x, x)
        value = tl.load(at + 1, mask=mask, other=0.0)
        score = tl.load(at + COLUMNS + 1, mask=mask, other=float("-inf"))
        peak_y, total_y, y = _blend(value, score, peak_y, total_y, y)
    x = x / tl.where(total_x > 0, total_x, 1.0)
    y = y / tl.where(total_y > 0, total_y, 1.0)
    rstd = tl.rsqrt((tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0)) / WIDTH + eps)
    x *= rstd * tl.load(weight_ptr + 2 * pair, mask=live, other=0.0).to(tl.float32)
    y *= rstd * tl.load(weight_ptr + 2 * pair + 1, mask=live, other=0.0).to(tl.float32)
    angle = pair - (WIDTH - ROT) // 2
    turning = live & (angle >= 0)
    angles = cos_sin_ptr + start * stride_angle + angle
    cos = tl.load(angles, mask=turning, other=1.0)
    sin = tl.load(angles + ROT // 2, mask=turning, other=0.0)
    out = entries_ptr + block * stride_entry_block + (entry % ENTRY_BLOCK_SIZE) * WIDTH + 2 * pair
    dtype: tl.constexpr = entries_ptr.dtype.element_ty
    tl.store(out, (x * cos - y * sin).to(dtype), mask=live)
    tl.store(out + 1, (y * cos + x * sin).to(dtype), mask=live)


_compress = Launcher(_compress_kernel)


def compress(p: CompressProblem) -> None:
    """See `naive.compress`."""
    num_seqs, width = len(p.tokens.block_table), p.entries.cache.shape[2]
    if num_seqs == 0:
        return
    query_len = len(p.positions) // num_seqs
    block_p = next_power_of_2(width // 2)
    rows = (1 + p.overlap) * p.ratio
    _compress[(num_seqs, cdiv(query_len, p.ratio), 1)](
        p.tokens.cache,
        p.tokens.block_table,
        p.entries.cache,
        p.entries.block_table,
        p.positions,
        p.slot_mapping,
        p.norm_weight,
        p.cos_sin,
        p.eps,
        query_len,
        p.tokens.cache.stride(0),
        p.tokens.block_table.stride(0),
        p.entries.cache.stride(0),
        p.entries.block_table.stride(0),
        p.tokens.block_table.shape[1],
        p.entries.block_table.shape[1],
        p.cos_sin.stride(0),
        RATIO=p.ratio,
        OVERLAP=p.overlap,
        BLOCK_SIZE=p.tokens.cache.shape[1],
        ENTRY_BLOCK_SIZE=p.entries.cache.shape[1],
        WIDTH=width,
        ROT=p.cos_sin.shape[1],
        BLOCK_P=block_p,
        BLOCK_R=min(next_power_of_2(rows), max(1, _TILE_ELEMENTS // block_p)),
        num_warps=4,
    )
