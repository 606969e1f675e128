# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Attention of short queries over the paged cache: split keys, one program per share.

Online softmax as in FlashAttention-2 (arXiv 2307.08691, algorithm 1), shares joined by their
log-sum-exp as in Flash-Decoding, in their order, by the program that finishes last. The query
heads of one kv head share a tile: row `r` is token `r // GROUP`, head `r % GROUP`, so keys are
loaded once per group.

The grid follows from host integers, so a captured graph stays valid for any length up to its
bound. How many of its splits a sequence uses follows on the device from that sequence's length
alone: so many keys each or more, and the programs beyond the last one leave at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.activation.triton import gated
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.attention.triton_tile import (
    LOG2_E,
    first_key,
    first_scores,
    fold,
    keys_and_values,
    strides_of,
    visible,
)
from vllm.kernels.stream_counters import per_stream
from vllm.kernels.triton.dependent_launch import await_previous, dependent_launch, start_next
from vllm.kernels.triton.launcher import Launcher
from vllm.kernels.triton.tile_files import Configs, Tile, pick
from vllm.utils.math_utils import cdiv, next_power_of_2

#: keys that are worth a share of a chip that has room for all shares at once
SPLIT_KEYS = 64
#: the same, and the most shares, where programs take turns
TURN_KEYS, TURN_SPLITS = 256, 8
#: part of the programs' turns in which the chip is idle, above which keys are split further
MOST_IDLE = 1 / 4
#: numbers that shares on their way to be joined may take
SHARED_NUMBERS = 16 * 2**20
#: numbers that a thread holds of the shares it joins
JOINED_PER_THREAD = 64
#: programs whose shares may be joined at once: more than the multiprocessors of any GPU
MAX_JOINS = 1024


@triton.jit
def _shares(first, limit, splits, split_keys, BLOCK_N: tl.constexpr):
    """`(keys of a share, shares)` of the keys `[first, limit)`: whole tiles, `splits` at most."""
    wanted = tl.minimum(tl.cdiv(limit - first, split_keys), splits)
    size = tl.cdiv(tl.cdiv(limit - first, tl.maximum(wanted, 1)), BLOCK_N) * BLOCK_N
    return size, tl.cdiv(limit - first, size)


@triton.jit
def _joined(
    part_ptr, lse_ptr, base, valid, used,
    HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The first `used` shares of rows, from `base [BLOCK_R]` on, by their parts of the softmax.

    The cache modifier is that of what another program wrote meanwhile.
    """
    d = tl.arange(0, BLOCK_D)[None, None, :]
    peak = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(0, used, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)[None, :]
        live = valid[:, None] & (s < used)
        share = base[:, None] + s
        lse = tl.load(lse_ptr + share, mask=live, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            part_ptr + share[:, :, None] * HEAD_DIM + d,
            mask=live[:, :, None] & (d < HEAD_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(lse, axis=1))
        # A row without a token has no share, and the first of a later row may see no key.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.math.exp2(lse - shift[:, None])
        fade = tl.math.exp2(peak - shift)
        total = total * fade + tl.sum(weight, axis=1)
        acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], axis=1)
        peak = new_peak
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _write(
    acc, inside, place, head, out_ptr, gate_ptr, stride_out_token, stride_out_head,
    stride_gate_token, stride_gate_head, GATED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of the output, those `inside`."""
    d = tl.arange(0, BLOCK_D)
    acc = acc.to(out_ptr.dtype.element_ty)
    if GATED:
        row = gate_ptr + place * stride_gate_token + head * stride_gate_head
        acc = gated(acc, tl.load(row[:, None] + d[None, :], mask=inside, other=0.0))
    row = out_ptr + place * stride_out_token + head * stride_out_head
    tl.store(row[:, None] + d[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["splits", "split_keys", "stride_table"])
def _decode_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    gate_ptr,
    sinks_ptr,
    part_ptr,
    lse_ptr,
    arrived_ptr,
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
    stride_gate_token,
    stride_gate_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (kv heads, sequences, splits).

    With SPLIT a share is normalised in `part [tokens, HEADS, splits, HEAD_DIM]` fp32, with its
    base-2 log-sum-exp in `lse [tokens, HEADS, splits]`, -inf where nothing was seen; `arrived
    [sequences, kv heads]` int32 counts the programs that wrote theirs, and is left zero.
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
    first = first_key(lowest, WINDOW, BLOCK_N)
    last = seq_len
    if SPLIT:
        size, used = _shares(first, seq_len, splits, split_keys, BLOCK_N)
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
    # A sink belongs to the first share, which every sequence has.
    peak, total = first_scores(sinks_ptr, head, split == 0, SINKS)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = table_ptr + seq.to(tl.int64) * stride_table
    cache = cache_ptr + kv_head * HEAD_DIM
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        k, v = keys_and_values(
            table, cache, n, last, lowest, stride_block, q.dtype,
            True, WINDOW, BLOCK_SIZE, slot, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = visible(n, position, lowest, seq_len, WINDOW, ROWS) & (n < last)[None, :]
        score = tl.where(seen, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        peak, total, acc = fold(score, v, new_peak, peak, total, acc, True)

    acc = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    place = (q_start + token).to(tl.int64)
    if SPLIT:
        if used == 1:
            _write(
                acc, inside, place, head, out_ptr, gate_ptr, stride_out_token, stride_out_head,
                stride_gate_token, stride_gate_head, GATED, BLOCK_D,
            )  # fmt: skip
            return
        part = (place * HEADS + head) * splits + split
        tl.store(lse_ptr + part, peak + tl.math.log2(total), mask=valid)
        tl.store(part_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
        # The atomic is one thread's; the barrier puts every thread's stores before its release.
        tl.debug_barrier()
        counter = arrived_ptr + seq * tl.num_programs(0) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < used - 1:
            return
        tl.store(counter, 0)
        r = tl.arange(0, BLOCK_R)
        token = r // GROUP
        head = kv_head * GROUP + r % GROUP
        valid = token < query_len
        inside = valid[:, None] & (d < HEAD_DIM)[None, :]
        place = (q_start + token).to(tl.int64)
        base = (place * HEADS + head) * splits
        acc = _joined(part_ptr, lse_ptr, base, valid, used, HEAD_DIM, BLOCK_R, BLOCK_S, BLOCK_D)
    _write(
        acc, inside, place, head, out_ptr, gate_ptr, stride_out_token, stride_out_head,
        stride_gate_token, stride_gate_head, GATED, BLOCK_D,
    )  # fmt: skip


_decode = Launcher(_decode_kernel)


@per_stream
def arrivals(device: torch.device) -> Tensor:
    """`[MAX_JOINS]` int32, zero between launches."""
    return torch.zeros(MAX_JOINS, dtype=torch.int32, device=device)


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


@dataclass(frozen=True)
class Shares:
    """`splits`: the most shares of a sequence; `keys` that are worth one; the `tile` of each."""

    splits: int
    keys: int
    tile: Tile


def shares_of(p: AttentionProblem, configs: Configs) -> Shares:
    """How the keys of `p` are divided.

    Where one program for each sequence and kv head would leave much of the chip idle, in its only
    turn or in the last of several, there are more and smaller ones, which even that out: measured
    with 16-bit activations only. From host integers alone, as `num_splits`.
    """
    chip, programs = configs.multiprocessors, p.num_seqs * p.num_kv_heads
    splits = num_splits(p.num_seqs, p.num_kv_heads, p.max_seq_len, chip)
    if p.query.element_size() > 2:
        return Shares(splits, SPLIT_KEYS, pick(configs.attention_decode_fp32, p.head_dim))
    if splits == 1 and programs <= MAX_JOINS and idle_part(programs, chip) > MOST_IDLE:
        room = SHARED_NUMBERS // p.query.numel()
        splits = max(1, min(TURN_SPLITS, room, cdiv(p.max_seq_len, TURN_KEYS)))
        if splits > 1:
            return Shares(splits, TURN_KEYS, pick(configs.attention_decode_many, p.head_dim))
    tile = decode_tile(configs, p.num_seqs, p.num_kv_heads, p.head_dim)
    return Shares(splits, SPLIT_KEYS, tile)


def idle_part(programs: int, chip: int) -> float:
    """Of the time that `programs` take, the part of the chip that is idle: one of large tiles has
    a multiprocessor to itself, two of smaller ones share one."""
    at_once = chip if programs <= chip else 2 * chip
    return 1 - programs / (cdiv(programs, at_once) * at_once)


def _shares_at_once(rows: int, columns: int, num_warps: int) -> int:
    """A power of two of shares, all of whose rows are joined in registers."""
    return max(1, min(32, JOINED_PER_THREAD * 32 * num_warps // (rows * columns)))


def decode_attention(p: AttentionProblem, shares: Shares) -> None:
    """`paged_attention` of queries whose group's rows fit one tile.

    Raises:
        ValueError: more than `MAX_JOINS` sequences times kv heads have their keys split.
    """
    splits, tile = shares.splits, shares.tile
    block_d = next_power_of_2(p.head_dim)
    block_m = max(tile.rows, next_power_of_2(p.max_query_len * p.group))
    block_r = next_power_of_2(p.group) if p.max_query_len == 1 and splits > 1 else block_m
    device = p.query.device
    part = lse = arrived = None
    if splits > 1:
        if p.num_seqs * p.num_kv_heads > MAX_JOINS:
            raise ValueError(f"{p.num_seqs} sequences of {p.num_kv_heads} kv heads are not split")
        arrived = arrivals(device)
        shape = (p.num_tokens, p.num_heads, splits)
        part = torch.empty(*shape, p.head_dim, dtype=torch.float32, device=device)
        lse = torch.empty(shape, dtype=torch.float32, device=device)
    _decode[(p.num_kv_heads, p.num_seqs, splits)](
        p.query,
        p.kv_cache,
        p.block_table,
        p.seq_lens,
        p.query_start_loc,
        p.out,
        p.gate,
        p.sinks,
        part,
        lse,
        arrived,
        splits,
        shares.keys,
        p.scale * p.k_scale * LOG2_E,
        p.v_scale,
        *strides_of(p),
        HEADS=p.num_heads,
        GROUP=p.group,
        HEAD_DIM=p.head_dim,
        BLOCK_SIZE=p.block_size,
        WINDOW=p.sliding_window or 0,
        ROWS=int(p.rows),
        SPLIT=splits > 1,
        GATED=p.gate is not None,
        SINKS=p.sinks is not None,
        BLOCK_M=block_m,
        BLOCK_N=tile.columns,
        BLOCK_D=block_d,
        BLOCK_R=block_r,
        BLOCK_S=_shares_at_once(block_r, block_d, tile.num_warps),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **dependent_launch(device),
    )
