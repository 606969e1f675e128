# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Causal attention over the paged cache: FlashAttention-2 tiles, and split-KV for short queries.

Online softmax as in FlashAttention-2 (arXiv 2307.08691, algorithm 1), splits joined by their
log-sum-exp as in Flash-Decoding. The query heads of one kv head share a tile: row `r` is token
`r // GROUP`, head `r % GROUP`, so keys are loaded once per group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.configs import Tile, device_configs, pick
from vllm.kernels.triton.ragged import find_sequence, num_tiles

LOG2_E = 1.4426950408889634
MAX_SPLITS = 128
SHORT_ROWS = 64
PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit
def _stream_keys(
    q, peak, total, acc, table, cache, position, first, last, limit, scale, stride_block,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLOT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold keys `[first, last)` into the running softmax; keys from `limit` on are not read."""
    d = tl.arange(0, BLOCK_D)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table + n // BLOCK_SIZE, mask=n < limit, other=0)
        else:
            block = tl.load(table + n // BLOCK_SIZE)
        row = block.to(tl.int64) * stride_block + (n % BLOCK_SIZE) * SLOT
        k_ptr = cache + row[:, None] + d[None, :]
        v_ptr = k_ptr + BLOCK_SIZE * SLOT
        if MASKED or HEAD_DIM != BLOCK_D:
            live = n < limit
            if MASKED and WINDOW > 0:
                # Blocks that slid out may be another group's by now: not even 0 times a value.
                live &= n > tl.min(position) - WINDOW
            inside = live[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(k_ptr, mask=inside, other=0.0)
            v = tl.load(v_ptr, mask=inside, other=0.0)
        else:
            k = tl.load(k_ptr)
            v = tl.load(v_ptr)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = n[None, :] <= position[:, None]
            if WINDOW > 0:
                visible &= n[None, :] > position[:, None] - WINDOW
            score = tl.where(visible, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1) * scale)
        shift = new_peak
        if MASKED:
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.math.exp2(score * scale - shift[:, None])
        fade = tl.math.exp2(peak - shift)
        total = total * fade + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit(do_not_specialize=["num_seqs", "splits", "stride_table"])
def _attention_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    lse_ptr,
    num_seqs,
    splits,
    scale,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_table,
    stride_out_token,
    stride_out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (query tiles, kv heads, splits); SHORT: one query tile per sequence.

    With SPLIT the output is partial: `out [tokens, HEADS, splits, HEAD_DIM]` fp32, normalised, and
    its base-2 log-sum-exp `lse [tokens, HEADS, splits]`, -inf where nothing was seen.
    """
    block_q: tl.constexpr = BLOCK_M // GROUP
    slot: tl.constexpr = HEADS // GROUP * HEAD_DIM
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if SHORT:
        seq = tl.program_id(0)
        q_tile = 0
    else:
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
    first = 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    last = limit
    if SPLIT:
        per_split = tl.cdiv(tl.cdiv(limit - first, BLOCK_N), splits) * BLOCK_N
        first += split * per_split
        last = tl.minimum(first + per_split, limit)

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = table_ptr + seq.to(tl.int64) * stride_table
    cache = cache_ptr + kv_head * HEAD_DIM
    middle = first
    if WINDOW == 0:
        middle = tl.maximum(tl.minimum((lowest + 1) // BLOCK_N * BLOCK_N, last), first)
        peak, total, acc = _stream_keys(
            q, peak, total, acc, table, cache, position, first, middle, limit, scale,
            stride_block, False, WINDOW, BLOCK_SIZE, slot, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    peak, total, acc = _stream_keys(
        q, peak, total, acc, table, cache, position, middle, last, limit, scale,
        stride_block, True, WINDOW, BLOCK_SIZE, slot, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        place = ((q_start + token) * HEADS + head) * splits + split
        tl.store(lse_ptr + place, peak + tl.math.log2(total), mask=valid)
        seen = inside & (total > 0)[:, None]
        tl.store(out_ptr + place[:, None] * HEAD_DIM + d[None, :], acc, mask=seen)
    else:
        row = out_ptr + (q_start + token) * stride_out_token + head * stride_out_head
        tl.store(row[:, None] + d[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def _join_splits_kernel(
    part_ptr,
    lse_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    splits,
    stride_out_token,
    stride_out_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (sequences, heads, longest query): weigh each split by its share of the softmax."""
    seq, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts_ptr + seq).to(tl.int64) + tl.program_id(2)
    if (tl.load(seq_lens_ptr + seq) == 0) | (token >= tl.load(starts_ptr + seq + 1)):
        return
    base = (token * HEADS + head) * splits
    every = tl.arange(0, MAX_SPLITS)
    lse = tl.load(lse_ptr + base + every, mask=every < splits, other=float("-inf"))
    peak = tl.max(lse, axis=0)
    total = tl.sum(tl.math.exp2(lse - peak), axis=0)
    used = tl.max(tl.where(lse > float("-inf"), every, 0), axis=0) + 1
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, used, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        weight = tl.load(lse_ptr + base + s, mask=s < splits, other=float("-inf"))
        inside = (weight > float("-inf"))[:, None] & (d < HEAD_DIM)[None, :]
        part = tl.load(
            part_ptr + (base + s)[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0
        )
        acc += tl.sum(part * tl.math.exp2(weight - peak)[:, None], axis=0)
    row = out_ptr + token * stride_out_token + head * stride_out_head
    tl.store(row + d, acc / total, mask=d < HEAD_DIM)


def num_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, tile: Tile, chip: int) -> int:
    """Splits per sequence that fill `chip` multiprocessors, from host integers only."""
    wanted = triton.cdiv(chip * PROGRAMS_PER_MULTIPROCESSOR, num_seqs * num_kv_heads)
    return max(1, min(wanted, MAX_SPLITS, triton.cdiv(max_seq_len, 2 * tile.columns)))


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
) -> None:
    """See `Kernels.paged_attention`.

    Short queries (`max_query_len * group <= 64` rows) take the split-KV path, whose grid follows
    from `num_seqs` and `max_seq_len`: a graph captured with a bound on the length stays valid.
    """
    tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_seqs = kv_cache.shape[3], len(seq_lens)
    group = num_heads // num_kv_heads
    if tokens == 0 or num_seqs == 0:
        return
    configs = device_configs(query.device)
    wide = query.element_size() > 2
    short = max_query_len * group <= SHORT_ROWS
    if short:
        table = configs.attention_decode_fp32 if wide else configs.attention_decode
    else:
        table = configs.attention_prefill_fp32 if wide else configs.attention_prefill
    tile = pick(table, head_dim)
    needed = max_query_len * group if short else group
    block_m = max(tile.rows, triton.next_power_of_2(needed))
    block_d = triton.next_power_of_2(head_dim)
    splits = (
        num_splits(num_seqs, num_kv_heads, max_seq_len, tile, configs.multiprocessors)
        if short
        else 1
    )
    part, lse = out, None
    if splits > 1:
        shape = (tokens, num_heads, splits)
        part = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    tiles = num_seqs if short else num_tiles(tokens, num_seqs, block_m // group)
    _attention_kernel[(tiles, num_kv_heads, splits)](
        query,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        part,
        lse,
        num_seqs,
        splits,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        WINDOW=sliding_window or 0,
        SPLIT=splits > 1,
        SHORT=short,
        BLOCK_M=block_m,
        BLOCK_N=tile.columns,
        BLOCK_D=block_d,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if lse is not None:
        _join_splits_kernel[(num_seqs, num_heads, max_query_len)](
            part,
            lse,
            seq_lens,
            query_start_loc,
            out,
            splits,
            out.stride(0),
            out.stride(1),
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            MAX_SPLITS=MAX_SPLITS,
            BLOCK_S=16,
            BLOCK_D=block_d,
        )
