# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Causal attention over the paged cache in FlashAttention-2 tiles (arXiv 2307.08691, algorithm 1).

The query heads of one kv head share a tile: row `r` is token `r // GROUP`, head `r % GROUP`, so
keys are loaded once per group. Short queries go to `decode_attention`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.hopper_attention import ShortAttentionOp, takes_attention
from vllm.kernels.triton.activation import gated
from vllm.kernels.triton.attention_tile import (
    LOG2_E,
    first_key,
    fold,
    keys_and_values,
    strides_of,
    visible,
)
from vllm.kernels.triton.configs import device_configs, pick
from vllm.kernels.triton.decode_attention import decode_attention, decode_tile, num_splits
from vllm.kernels.triton.launcher import Launcher
from vllm.kernels.triton.ragged import find_sequence, num_tiles
from vllm.utils.math_utils import next_power_of_2

SHORT_ROWS = 64


@triton.jit
def _stream_keys(
    q, peak, total, acc, table, cache, position, lowest, first, last, limit, scale, stride_block,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLOT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold keys `[first, last)` into the running softmax; keys from `limit` on are not read."""
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k, v = keys_and_values(
            table, cache, n, limit, lowest, stride_block, q.dtype,
            MASKED, WINDOW, BLOCK_SIZE, SLOT, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            score = tl.where(visible(n, position, WINDOW), score, float("-inf"))
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
    GATED: tl.constexpr,
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
    first = first_key(lowest, WINDOW, BLOCK_N)

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = table_ptr + seq.to(tl.int64) * stride_table
    cache = cache_ptr + kv_head * HEAD_DIM
    middle = first
    if WINDOW == 0:
        middle = tl.maximum(tl.minimum((lowest + 1) // BLOCK_N * BLOCK_N, limit), first)
        peak, total, acc = _stream_keys(
            q, peak, total, acc, table, cache, position, lowest, first, middle, limit, scale,
            stride_block, False, WINDOW, BLOCK_SIZE, slot, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    peak, total, acc = _stream_keys(
        q, peak, total, acc, table, cache, position, lowest, middle, limit, limit, scale,
        stride_block, True, WINDOW, BLOCK_SIZE, slot, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    acc = (acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]).to(out_ptr.dtype.element_ty)
    if GATED:
        row = gate_ptr + (q_start + token) * stride_gate_token + head * stride_gate_head
        acc = gated(acc, tl.load(row[:, None] + d[None, :], mask=inside, other=0.0))
    row = out_ptr + (q_start + token) * stride_out_token + head * stride_out_head
    tl.store(row[:, None] + d[None, :], acc, mask=inside)


_attention = Launcher(_attention_kernel)


@dataclass(frozen=True)
class AttentionOps:
    """The op with a choice of kernels: `short` for what it takes, else Triton's."""

    short: ShortAttentionOp | None

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        *,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        sliding_window: int | None,
        out: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        gate: Tensor | None = None,
    ) -> None:
        """See `Kernels.paged_attention`."""
        batch = (query, kv_cache, block_table, seq_lens, query_start_loc)
        num_seqs = len(seq_lens)
        if num_seqs == 0 or len(query) == 0:
            return
        chip = device_configs(query.device).multiprocessors
        if self.short is not None and takes_attention(
            query, kv_cache, num_seqs, max_query_len, out, gate, chip
        ):
            self.short(
                *batch,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                scale=scale * k_scale,
                v_scale=v_scale,
                sliding_window=sliding_window,
                out=out,
                gate=gate,
            )
            return
        paged_attention(
            *batch,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            scale=scale,
            sliding_window=sliding_window,
            out=out,
            k_scale=k_scale,
            v_scale=v_scale,
            gate=gate,
        )


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None,
    out: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    gate: Tensor | None = None,
) -> None:
    """See `Kernels.paged_attention`.

    Short queries (`max_query_len * group <= 64` rows) share their keys among several programs.
    """
    tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_seqs = kv_cache.shape[3], len(seq_lens)
    group = num_heads // num_kv_heads
    if tokens == 0 or num_seqs == 0:
        return
    configs = device_configs(query.device)
    wide = query.element_size() > 2
    if max_query_len * group <= SHORT_ROWS:
        tile = (
            pick(configs.attention_decode_fp32, head_dim)
            if wide
            else decode_tile(configs, num_seqs, num_kv_heads, head_dim)
        )
        decode_attention(
            query,
            kv_cache,
            block_table,
            seq_lens,
            query_start_loc,
            max_query_len=max_query_len,
            splits=num_splits(num_seqs, num_kv_heads, max_seq_len, configs.multiprocessors),
            scale=scale * k_scale,
            v_scale=v_scale,
            sliding_window=sliding_window,
            tile=tile,
            out=out,
            gate=gate,
        )
        return
    tile = pick(configs.attention_prefill_fp32 if wide else configs.attention_prefill, head_dim)
    block_m = max(tile.rows, next_power_of_2(group))
    _attention[(num_tiles(tokens, num_seqs, block_m // group), num_kv_heads)](
        query,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        gate,
        num_seqs,
        scale * k_scale * LOG2_E,
        v_scale,
        *strides_of(query, kv_cache, block_table, out, gate),
        HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        WINDOW=sliding_window or 0,
        GATED=gate is not None,
        BLOCK_M=block_m,
        BLOCK_N=tile.columns,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
