# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Absorbed latent attention: every head's query attends to the latents themselves.

A latent is loaded once per tile, as key and as value. Query rows of all heads share tiles: row `r`
is token `r // HEADS`, head `r % HEADS`. Softmax runs online as in FlashAttention-2 (arXiv
2307.08691, algorithm 1); where few sequences leave multiprocessors idle, the keys of each are split
and its shares joined by their log-sum-exp, in their order, by a second launch. Grids follow from
host integers, and how many shares a sequence uses from its own length, so a captured graph stays
valid for any length up to its bound.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.attention.triton_decode import SPLIT_KEYS, num_splits
from vllm.kernels.attention.triton_tile import LOG2_E, fold
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.triton.configs import device_configs
from vllm.kernels.triton.launcher import Launcher
from vllm.kernels.triton.tile_files import Tile
from vllm.utils.math_utils import cdiv, next_power_of_2

#: (query rows, keys): latents of 512 and 64 shared dimensions fit 96 KiB of shared memory
_TILE = Tile(32, 32, num_warps=8, num_stages=3)
_TILE_FP32 = Tile(16, 16, num_warps=4, num_stages=1)
#: the least that tensor cores take
_LEAST = 16


@triton.jit
def _shares(seq_len, splits, split_keys, BLOCK_N: tl.constexpr):
    """`(keys of a share, shares)` of a sequence: whole tiles, `splits` at most."""
    wanted = tl.minimum(tl.cdiv(seq_len, split_keys), splits)
    size = tl.cdiv(tl.cdiv(seq_len, wanted), BLOCK_N) * BLOCK_N
    return size, tl.cdiv(seq_len, size)


@triton.jit(do_not_specialize=["splits", "split_keys", "stride_table"])
def _latents_kernel(
    q_ptr,
    shared_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    splits,
    split_keys,
    scale,
    stride_q_head,
    stride_q_token,
    stride_shared_token,
    stride_shared_head,
    stride_block,
    stride_table,
    stride_out_head,
    stride_out_token,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid (row tiles of the longest query, sequences, splits).

    With SPLIT a share is normalised in `part [tokens, HEADS, splits, LATENT]` fp32, with its base-2
    log-sum-exp in `lse [tokens, HEADS, splits]`, -inf where a row sees none of its keys.
    """
    tile = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    q_start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - q_start
    if (seq_len == 0) | (tile * BLOCK_M >= query_len * HEADS):
        return
    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = r // HEADS
    head = r % HEADS
    valid = token < query_len
    position = seq_len - query_len + token
    newest = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, query_len - 1)
    first = 0
    last = seq_len - query_len + newest + 1
    if SPLIT:
        size, _ = _shares(seq_len, splits, split_keys, BLOCK_N)
        first = split * size
        if first >= seq_len:
            return
        last = tl.minimum(first + size, last)

    d = tl.arange(0, BLOCK_L)
    s = tl.arange(0, BLOCK_S)
    place = (q_start + token).to(tl.int64)
    wide = valid[:, None] & (d < LATENT)[None, :]
    q_row = q_ptr + head * stride_q_head + place * stride_q_token
    q = tl.load(q_row[:, None] + d[None, :], mask=wide, other=0.0)
    q_row = shared_ptr + place * stride_shared_token + head * stride_shared_head
    q_shared = tl.load(
        q_row[:, None] + s[None, :], mask=valid[:, None] & (s < SHARED)[None, :], other=0.0
    )
    table = table_ptr + seq.to(tl.int64) * stride_table
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < last
        block = tl.load(table + n // BLOCK_SIZE, mask=live, other=0)
        row = block.to(tl.int64) * stride_block + (n % BLOCK_SIZE) * (LATENT + SHARED)
        latent = tl.load(
            cache_ptr + row[:, None] + d[None, :],
            mask=live[:, None] & (d < LATENT)[None, :],
            other=0.0,
        )
        shared = tl.load(
            cache_ptr + LATENT + row[:, None] + s[None, :],
            mask=live[:, None] & (s < SHARED)[None, :],
            other=0.0,
        )
        score = tl.dot(q, tl.trans(latent), input_precision="ieee")
        score = tl.dot(q_shared, tl.trans(shared), score, input_precision="ieee") * scale
        score = tl.where(live[None, :] & (n[None, :] <= position[:, None]), score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        peak, total, acc = fold(score, latent, new_peak, peak, total, acc, True)

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        part = (place * HEADS + head) * splits + split
        tl.store(lse_ptr + part, peak + tl.math.log2(total), mask=valid)
        tl.store(part_ptr + part[:, None] * LATENT + d[None, :], acc, mask=wide)
    else:
        row = out_ptr + head * stride_out_head + place * stride_out_token
        tl.store(row[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=wide)


@triton.jit(do_not_specialize=["splits", "split_keys"])
def _join_kernel(
    part_ptr,
    lse_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    splits,
    split_keys,
    stride_out_head,
    stride_out_token,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Grid (rows of the longest query, sequences): one row's shares, in their order."""
    token = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    q_start = tl.load(starts_ptr + seq)
    if (seq_len == 0) | (token >= tl.load(starts_ptr + seq + 1) - q_start):
        return
    _, used = _shares(seq_len, splits, split_keys, BLOCK_N)
    place = (q_start + token).to(tl.int64)
    base = (place * HEADS + head) * splits
    d = tl.arange(0, BLOCK_L)
    # Of the first share every row sees a key.
    peak = tl.load(lse_ptr + base)
    total = peak * 0.0 + 1.0
    acc = tl.load(part_ptr + base * LATENT + d, mask=d < LATENT, other=0.0)
    for share in range(1, used):
        lse = tl.load(lse_ptr + base + share)
        part = tl.load(part_ptr + (base + share) * LATENT + d, mask=d < LATENT, other=0.0)
        new_peak = tl.maximum(peak, lse)
        fade = tl.math.exp2(peak - new_peak)
        weight = tl.math.exp2(lse - new_peak)
        total = total * fade + weight
        acc = acc * fade + part * weight
        peak = new_peak
    row = out_ptr + head * stride_out_head + place * stride_out_token
    tl.store(row + d, (acc / total).to(out_ptr.dtype.element_ty), mask=d < LATENT)


_latents = Launcher(_latents_kernel)
_join = Launcher(_join_kernel)


def latent_attention(p: LatentAttentionProblem) -> None:
    """See `naive.latent_attention`."""
    if not p.is_empty:
        absorbed(p, attend_to_latents)


def absorbed(
    p: LatentAttentionProblem, attend: Callable[[LatentAttentionProblem, Tensor], Tensor]
) -> None:
    """Fill `p.out`: two products of many small matrices around `attend_to_latents` or its like."""
    query = torch.bmm(p.query[..., : p.nope].transpose(0, 1), p.kv_b[:, : p.nope])
    values = p.kv_b[:, p.nope :].transpose(1, 2)
    torch.bmm(attend(p, query), values, out=p.out.transpose(0, 1))


def attend_to_latents(p: LatentAttentionProblem, query: Tensor) -> Tensor:
    """The mean of latents under the softmax: `query` and the result `[heads, tokens, latent]`."""
    device, heads = p.query.device, p.num_heads
    tile = _TILE_FP32 if p.query.element_size() > 2 else _TILE
    rows = p.max_query_len * heads
    block_m = min(tile.rows, max(_LEAST, next_power_of_2(rows)))
    tiles = cdiv(rows, block_m)
    splits = num_splits(p.num_seqs, tiles, p.max_seq_len, device_configs(device).multiprocessors)
    out = torch.empty_like(query)
    part, lse = memory_of_shares(p, splits)
    shared = p.query[..., p.nope :]
    _latents[(tiles, p.num_seqs, splits)](
        query,
        shared,
        p.cache,
        p.block_table,
        p.seq_lens,
        p.query_start_loc,
        out,
        part,
        lse,
        splits,
        SPLIT_KEYS,
        p.scale * LOG2_E,
        *query.stride()[:2],
        *shared.stride()[:2],
        p.cache.stride(0),
        p.block_table.stride(0),
        *out.stride()[:2],
        HEADS=heads,
        LATENT=p.latent,
        SHARED=p.shared,
        BLOCK_SIZE=p.block_size,
        SPLIT=splits > 1,
        BLOCK_M=block_m,
        BLOCK_N=tile.columns,
        BLOCK_L=max(_LEAST, next_power_of_2(p.latent)),
        BLOCK_S=max(_LEAST, next_power_of_2(p.shared)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    join_shares(p, part, lse, out, SPLIT_KEYS, tile.columns)
    return out


def memory_of_shares(
    p: LatentAttentionProblem, splits: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """`part [tokens, heads, splits, latent]` and `lse [tokens, heads, splits]`, both fp32, for
    `join_shares`; None where there is one share of a sequence."""
    if splits == 1:
        return None, None
    part = p.query.new_empty(p.num_tokens, p.num_heads, splits, p.latent, dtype=torch.float32)
    return part, part.new_empty(part.shape[:3])


def join_shares(
    p: LatentAttentionProblem,
    part: Tensor | None,
    lse: Tensor | None,
    out: Tensor,
    split_keys: int,
    tile_keys: int,
) -> None:
    """Fill `out [heads, tokens, latent]` from the shares of each row, if there are several: of
    `split_keys` or more each, in whole tiles of `tile_keys`."""
    if part is None or lse is None:
        return
    _join[(p.max_query_len * p.num_heads, p.num_seqs, 1)](
        part,
        lse,
        p.seq_lens,
        p.query_start_loc,
        out,
        part.shape[2],
        split_keys,
        *out.stride()[:2],
        HEADS=p.num_heads,
        LATENT=p.latent,
        BLOCK_N=tile_keys,
        BLOCK_L=max(_LEAST, next_power_of_2(p.latent)),
        num_warps=4,
    )
