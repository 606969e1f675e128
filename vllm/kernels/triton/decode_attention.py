# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Attention of short queries over the paged cache: split keys, one program per share.

Online softmax as in FlashAttention-2 (arXiv 2307.08691, algorithm 1), shares joined by their
log-sum-exp as in Flash-Decoding. The query heads of one kv head share a tile: row `r` is token
`r // GROUP`, head `r % GROUP`, so keys are loaded once per group.

The grid follows from host integers, so a captured graph stays valid for any length up to its
bound. How many of its splits a sequence uses follows on the device from that sequence's length
alone: about `SPLIT_KEYS` keys each or more, and the programs beyond the last one leave at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.dependent_launch import await_previous, dependent_launch, start_next
from vllm.kernels.triton.tiles import Configs, Tile, pick
from vllm.utils.math_utils import cdiv, next_power_of_2

LOG2_E = 1.4426950408889634
SPLIT_KEYS = 64
JOINED_SPLITS = 32


@triton.jit
def _shares(first, limit, splits, split_keys, BLOCK_N: tl.constexpr):
    """`(keys of a share, shares)` of the keys `[first, limit)`: whole tiles, `splits` at most."""
    wanted = tl.minimum(tl.cdiv(limit - first, split_keys), splits)
    size = tl.cdiv(tl.cdiv(limit - first, tl.maximum(wanted, 1)), BLOCK_N) * BLOCK_N
    return size, tl.cdiv(limit - first, size)


@triton.jit
def _first_key(lowest, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the tile of the lowest query position starts to look."""
    if WINDOW > 0:
        return tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return lowest * 0


@triton.jit(do_not_specialize=["splits", "split_keys", "stride_table"])
def _decode_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    lse_ptr,
    splits,
    split_keys,
    scale,
    v_scale,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (kv heads, sequences, splits).

    With SPLIT the output is partial: `out [tokens, HEADS, splits, HEAD_DIM]` fp32, normalised, and
    its base-2 log-sum-exp `lse [tokens, HEADS, splits]`, -inf where nothing was seen.
    """
    start_next(PDL)
    slot: tl.constexpr = HEADS // GROUP * HEAD_DIM
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    q_start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - q_start
    await_previous(PDL)
    if (seq_len == 0) | (query_len <= 0):
        return
    lowest = seq_len - query_len
    first = _first_key(lowest, WINDOW, BLOCK_N)
    last = seq_len
    if SPLIT:
        size, _ = _shares(first, seq_len, splits, split_keys, BLOCK_N)
        first += split * size
        last = tl.minimum(first + size, seq_len)
        if first >= last:
            return

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = r // GROUP
    head = kv_head * GROUP + r % GROUP
    valid = token < query_len
    position = lowest + token
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    row = q_ptr + (q_start + token).to(tl.int64) * stride_q_token + head * stride_q_head
    q = tl.load(row[:, None] + d[None, :], mask=inside, other=0.0)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = table_ptr + seq.to(tl.int64) * stride_table
    cache = cache_ptr + kv_head * HEAD_DIM
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        live = n < last
        block = tl.load(table + n // BLOCK_SIZE, mask=live, other=0)
        place = block.to(tl.int64) * stride_block + (n % BLOCK_SIZE) * slot
        if WINDOW > 0:
            # Blocks that slid out may be another group's by now: not even 0 times a value.
            live &= n > lowest - WINDOW
        there = live[:, None] & (d < HEAD_DIM)[None, :]
        k_ptr = cache + place[:, None] + d[None, :]
        k = tl.load(k_ptr, mask=there, other=0.0)
        v = tl.load(k_ptr + BLOCK_SIZE * slot, mask=there, other=0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = (n[None, :] <= position[:, None]) & (n < last)[None, :]
        if WINDOW > 0:
            visible &= n[None, :] > position[:, None] - WINDOW
        score = tl.where(visible, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.math.exp2(score - shift[:, None])
        fade = tl.math.exp2(peak - shift)
        total = total * fade + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = new_peak

    acc = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    if SPLIT:
        part = ((q_start + token).to(tl.int64) * HEADS + head) * splits + split
        tl.store(lse_ptr + part, peak + tl.math.log2(total), mask=valid)
        tl.store(out_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
    else:
        row = out_ptr + (q_start + token).to(tl.int64) * stride_out_token + head * stride_out_head
        tl.store(row[:, None] + d[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["splits", "split_keys"])
def _join_kernel(
    part_ptr,
    lse_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    splits,
    split_keys,
    stride_out_token,
    stride_out_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (heads, sequences, longest query): weigh each share by its part of the softmax."""
    start_next(PDL)
    head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    q_start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - q_start
    await_previous(PDL)
    if (seq_len == 0) | (tl.program_id(2) >= query_len):
        return
    first = _first_key(seq_len - query_len, WINDOW, BLOCK_N)
    _, used = _shares(first, seq_len, splits, split_keys, BLOCK_N)
    token = (q_start + tl.program_id(2)).to(tl.int64)
    base = (token * HEADS + head) * splits
    d = tl.arange(0, BLOCK_D)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, used, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_ptr + base + s, mask=s < used, other=float("-inf"))
        inside = (s < used)[:, None] & (d < HEAD_DIM)[None, :]
        part = tl.load(
            part_ptr + (base + s)[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0
        )
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        # The first shares of a later query row may see nothing of its window.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.math.exp2(lse - shift)
        fade = tl.math.exp2(peak - shift)
        total = total * fade + tl.sum(weight, axis=0)
        acc = acc * fade + tl.sum(part * weight[:, None], axis=0)
        peak = new_peak
    row = out_ptr + token * stride_out_token + head * stride_out_head
    tl.store(row + d, acc / total, mask=d < HEAD_DIM)


def num_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, chip: int) -> int:
    """The most shares of a sequence: those that fill `chip` multiprocessors once.

    From host integers only, so neither other sequences' lengths nor graph replay change a bit.
    """
    wave = chip // (num_seqs * num_kv_heads)
    return max(1, min(wave, cdiv(max_seq_len, SPLIT_KEYS)))


def decode_tile(configs: Configs, num_seqs: int, num_kv_heads: int, head_dim: int) -> Tile:
    """The tile for 16-bit activations: large ones where a program has a multiprocessor to itself,
    few stages where many wait for their turn."""
    programs = num_seqs * num_kv_heads
    if programs <= configs.multiprocessors:
        return pick(configs.attention_decode_few, head_dim)
    if programs <= 2 * configs.multiprocessors:
        return pick(configs.attention_decode, head_dim)
    return pick(configs.attention_decode_many, head_dim)


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    splits: int,
    scale: float,
    v_scale: float,
    sliding_window: int | None,
    tile: Tile,
    out: Tensor,
) -> None:
    """`Kernels.paged_attention` for queries whose group's rows fit one tile, keys in `splits`."""
    tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_seqs = kv_cache.shape[3], len(seq_lens)
    group = num_heads // num_kv_heads
    block_d = next_power_of_2(head_dim)
    part, lse = out, None
    if splits > 1:
        shape = (tokens, num_heads, splits)
        part = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    window = sliding_window or 0
    pdl = dependent_launch(query.device)
    _decode_kernel[(num_kv_heads, num_seqs, splits)](
        query,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        part,
        lse,
        splits,
        SPLIT_KEYS,
        scale * LOG2_E,
        v_scale,
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
        WINDOW=window,
        SPLIT=splits > 1,
        BLOCK_M=max(tile.rows, next_power_of_2(max_query_len * group)),
        BLOCK_N=tile.columns,
        BLOCK_D=block_d,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **pdl,
    )
    if lse is not None:
        _join_kernel[(num_heads, num_seqs, max_query_len)](
            part,
            lse,
            seq_lens,
            query_start_loc,
            out,
            splits,
            SPLIT_KEYS,
            out.stride(0),
            out.stride(1),
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            WINDOW=window,
            BLOCK_N=tile.columns,
            BLOCK_S=JOINED_SPLITS,
            BLOCK_D=block_d,
            num_warps=8,
            **pdl,
        )
