# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Attention to a window and to entries on GPUs: a token and some of its heads per program.

Rows are loaded once per tile, as keys and as values. Softmax runs online as in FlashAttention-2
(arXiv 2307.08691, algorithm 1) and starts from the sink.
"""

import triton
import triton.language as tl

from vllm.kernels.attention.triton_tile import LOG2_E, first_scores, fold
from vllm.kernels.compressed_attention import CompressedAttentionProblem, PagedRows
from vllm.kernels.compressed_attention.triton_rows import VARYING_NUMBERS, load_rows
from vllm.kernels.triton.launcher import Launcher
from vllm.kernels.triton.tile_files import Tile
from vllm.utils.math_utils import cdiv, next_power_of_2

#: (heads, rows): rows of 512 elements fit 96 KiB of shared memory
_TILE = Tile(32, 32, num_warps=8, num_stages=2)
_TILE_FP32 = Tile(16, 16, num_warps=4, num_stages=1)
#: the least that tensor cores take
_LEAST = 16


@triton.jit
def _fold_rows(q, rows, held, scale, peak, total, acc):
    """The running softmax after `rows [n, BLOCK_D]`, of which those that are `held [n]` count."""
    score = tl.dot(q, tl.trans(rows), input_precision="ieee") * scale
    score = tl.where(held[None, :], score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, axis=1))
    return fold(score, rows, new_peak, peak, total, acc, True)


_VARIES = ["table_ptr", "entry_table_ptr", "positions_ptr", *VARYING_NUMBERS]


@triton.jit(do_not_specialize=_VARIES)
def _attend_kernel(
    query_ptr,
    tokens_ptr,
    table_ptr,
    entries_ptr,
    entry_table_ptr,
    chosen_ptr,
    sinks_ptr,
    positions_ptr,
    out_ptr,
    scale,
    query_len,
    columns,
    entry_columns,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_table,
    stride_entry_block,
    stride_entry_table,
    stride_out_token,
    stride_out_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRY_BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (tokens, tiles of heads). RATIO 0: no entries; TOPK 0: all that are visible."""
    token = tl.program_id(0).to(tl.int64)
    seq = token // query_len
    position = tl.load(positions_ptr + token).to(tl.int32)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (d < WIDTH)[None, :]
    at = query_ptr + token * stride_q_token + head[:, None] * stride_q_head + d[None, :]
    q = tl.load(at, mask=mask, other=0.0)
    peak, total = first_scores(sinks_ptr, tl.where(head < HEADS, head, 0), head >= 0, True)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    table = table_ptr + seq * stride_table
    first = tl.maximum(position - WINDOW + 1, 0)
    for start in range(first, position + 1, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        rows, held = load_rows(
            tokens_ptr, table, index, index <= position, columns, stride_block,
            BLOCK_SIZE, WIDTH, BLOCK_D,
        )  # fmt: skip
        peak, total, acc = _fold_rows(q, rows, held, scale, peak, total, acc)
    if RATIO > 0:
        table = entry_table_ptr + seq * stride_entry_table
        visible = (position + 1) // RATIO
        count = visible
        if TOPK > 0:
            # All that are chosen come before those that are not.
            count = tl.minimum(visible, TOPK)
        for start in range(0, count, BLOCK_N):
            index = start + tl.arange(0, BLOCK_N)
            wanted = index < count
            if TOPK > 0:
                index = tl.load(chosen_ptr + token * TOPK + index, mask=wanted, other=-1)
                wanted &= index >= 0
            rows, held = load_rows(
                entries_ptr, table, index, wanted, entry_columns, stride_entry_block,
                ENTRY_BLOCK_SIZE, WIDTH, BLOCK_D,
            )  # fmt: skip
            peak, total, acc = _fold_rows(q, rows, held, scale, peak, total, acc)
    at = out_ptr + token * stride_out_token + head[:, None] * stride_out_head + d[None, :]
    tl.store(at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


_attend = Launcher(_attend_kernel)


def compressed_attention(p: CompressedAttentionProblem) -> None:
    """See `naive.compressed_attention`."""
    tokens, heads, width = p.query.shape
    if tokens == 0:
        return
    tile = _TILE_FP32 if p.query.element_size() > 2 else _TILE
    block_h = min(tile.rows, max(_LEAST, next_power_of_2(heads)))
    entries: PagedRows = p.tokens if p.entries is None else p.entries
    _attend[(tokens, cdiv(heads, block_h), 1)](
        p.query,
        p.tokens.cache,
        p.tokens.block_table,
        entries.cache,
        entries.block_table,
        p.chosen,
        p.sinks,
        p.positions,
        p.out,
        p.scale * LOG2_E,
        tokens // len(p.tokens.block_table),
        p.tokens.block_table.shape[1],
        entries.block_table.shape[1],
        *p.query.stride()[:2],
        p.tokens.cache.stride(0),
        p.tokens.block_table.stride(0),
        entries.cache.stride(0),
        entries.block_table.stride(0),
        *p.out.stride()[:2],
        HEADS=heads,
        WIDTH=width,
        WINDOW=p.window,
        RATIO=0 if p.entries is None else p.ratio,
        TOPK=0 if p.chosen is None else p.chosen.shape[1],
        BLOCK_SIZE=p.tokens.cache.shape[1],
        ENTRY_BLOCK_SIZE=entries.cache.shape[1],
        BLOCK_H=block_h,
        BLOCK_N=tile.columns,
        BLOCK_D=max(_LEAST, next_power_of_2(width)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
