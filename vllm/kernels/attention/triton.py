# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Attention over the paged cache in FlashAttention-2 tiles (arXiv 2307.08691, algorithm 1).

The query heads of one kv head share a tile: row `r` is token `r // GROUP`, head `r % GROUP`, so
keys are loaded once per group. Short queries go to `decode_attention`.
"""

import triton
import triton.language as tl

from vllm.kernels.activation.triton import gated
from vllm.kernels.attention import SHORT_ROWS, AttentionProblem
from vllm.kernels.attention.triton_decode import decode_attention, shares_of
from vllm.kernels.attention.triton_tile import (
    LOG2_E,
    TOKENS,
    WHOLE_BLOCK,
    first_key,
    first_scores,
    fold,
    keys_and_values,
    strides_of,
    visible,
)
from vllm.kernels.triton.configs import device_configs, pick
from vllm.kernels.triton.launcher import Launcher
from vllm.kernels.triton.ragged import find_sequence, num_tiles
from vllm.utils.math_utils import next_power_of_2


@triton.jit
def _stream_keys(
    q, peak, total, acc, table, cache, position, lowest, seq_len, first, last, limit, scale,
    stride_block, MASKED: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SLOT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold keys `[first, last)` into the running softmax; keys from `limit` on are not read.
    `lowest` is the position whose window begins first."""
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k, v = keys_and_values(
            table, cache, n, limit, lowest, stride_block, q.dtype,
            MASKED, WINDOW, BLOCK_SIZE, SLOT, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            score = tl.where(
                visible(n, position, lowest, seq_len, WINDOW, ROWS), score, float("-inf")
            )
        new_peak = tl.maximum(peak, tl.max(score, axis=1) * scale)
        peak, total, acc = fold(score * scale, v, new_peak, peak, total, acc, MASKED)
    return peak, total, acc


@triton.jit(do_not_specialize=["num_seqs", "stride_table"])
def _attention_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    gate_ptr,
    sinks_ptr,
    num_seqs,
    scale,
    v_scale,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_table,
    stride_out_token,
    stride_out_head,
    stride_gate_token,
    stride_gate_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (query tiles, kv heads)."""
    block_q: tl.constexpr = BLOCK_M // GROUP
    slot: tl.constexpr = HEADS // GROUP * HEAD_DIM
    kv_head = tl.program_id(1)
    seq, q_tile = find_sequence(
        starts_ptr, tl.num_programs(0) - 1 - tl.program_id(0), num_seqs, block_q
    )
    q_start = tl.load(starts_ptr + seq).to(tl.int64)
    query_len = (tl.load(starts_ptr + seq + 1) - q_start).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + seq)
    if (seq_len == 0) | (q_tile * block_q >= query_len):
        return

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = q_tile * block_q + r // GROUP
    head = kv_head * GROUP + r % GROUP
    valid = (r < block_q * GROUP) & (token < query_len)
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    row = q_ptr + (q_start + token) * stride_q_token + head * stride_q_head
    q = tl.load(row[:, None] + d[None, :], mask=inside, other=0.0)

    lowest = seq_len - query_len + q_tile * block_q
    position = seq_len - query_len + token
    limit = tl.minimum(lowest + block_q, seq_len)
    if ROWS == WHOLE_BLOCK:
        limit = seq_len
    if ROWS != TOKENS:
        lowest = seq_len - query_len
    first = first_key(lowest, WINDOW, BLOCK_N)

    peak, total = first_scores(sinks_ptr, head, True, SINKS)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = table_ptr + seq.to(tl.int64) * stride_table
    cache = cache_ptr + kv_head * HEAD_DIM
    middle = first
    if WINDOW == 0:
        middle = tl.maximum(tl.minimum((lowest + 1) // BLOCK_N * BLOCK_N, limit), first)
        peak, total, acc = _stream_keys(
            q, peak, total, acc, table, cache, position, lowest, seq_len, first, middle, limit,
            scale, stride_block, False, WINDOW, ROWS, BLOCK_SIZE, slot, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    peak, total, acc = _stream_keys(
        q, peak, total, acc, table, cache, position, lowest, seq_len, middle, limit, limit,
        scale, stride_block, True, WINDOW, ROWS, BLOCK_SIZE, slot, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    acc = (acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]).to(out_ptr.dtype.element_ty)
    if GATED:
        row = gate_ptr + (q_start + token) * stride_gate_token + head * stride_gate_head
        acc = gated(acc, tl.load(row[:, None] + d[None, :], mask=inside, other=0.0))
    row = out_ptr + (q_start + token) * stride_out_token + head * stride_out_head
    tl.store(row[:, None] + d[None, :], acc, mask=inside)


_attention = Launcher(_attention_kernel)


def paged_attention(p: AttentionProblem) -> None:
    """Short queries (`max_query_len * group <= 64` rows) share keys among several programs."""
    if p.is_empty:
        return
    configs = device_configs(p.query.device)
    wide = p.query.element_size() > 2
    if p.max_query_len * p.group <= SHORT_ROWS:
        decode_attention(p, shares_of(p, configs))
        return
    tile = pick(configs.attention_prefill_fp32 if wide else configs.attention_prefill, p.head_dim)
    block_m = max(tile.rows, next_power_of_2(p.group))
    _attention[(num_tiles(p.num_tokens, p.num_seqs, block_m // p.group), p.num_kv_heads)](
        p.query,
        p.kv_cache,
        p.block_table,
        p.seq_lens,
        p.query_start_loc,
        p.out,
        p.gate,
        p.sinks,
        p.num_seqs,
        p.scale * p.k_scale * LOG2_E,
        p.v_scale,
        *strides_of(p),
        HEADS=p.num_heads,
        GROUP=p.group,
        HEAD_DIM=p.head_dim,
        BLOCK_SIZE=p.block_size,
        WINDOW=p.sliding_window or 0,
        ROWS=int(p.rows),
        GATED=p.gate is not None,
        SINKS=p.sinks is not None,
        BLOCK_M=block_m,
        BLOCK_N=tile.columns,
        BLOCK_D=next_power_of_2(p.head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
