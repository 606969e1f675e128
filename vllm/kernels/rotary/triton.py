# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Per-head norm, rotary embedding and the cache write, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels import fp8
from vllm.kernels.fp8.quantize import to_fp8
from vllm.kernels.rotary import RotaryProblem
from vllm.kernels.triton.dependent_launch import await_previous, dependent_launch, start_next
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import cdiv, next_power_of_2

TILE_ELEMENTS = 2048
FP8_MAX = tl.constexpr(fp8.FP8_MAX)


@triton.jit
def _norm_rope(
    start,
    head_mask,
    w_ptr,
    angles,
    eps,
    HEAD_DIM: tl.constexpr,
    ROT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
):
    """Heads at pointers `start [heads]` -> normalised and rotated `[heads, BLOCK_D]` fp32.

    Each dim's rotation partner is a second load: it hits L1, and keeps the tile whole.
    """
    d = tl.arange(0, BLOCK_D)
    half: tl.constexpr = ROT // 2 if ROT > 0 else 1
    partner = tl.where(d < half, d + half, d - half)
    angle = d % half
    if half % 8 == 0:
        partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
        angle = tl.max_contiguous(tl.multiple_of(angle, 8), 8)
    mask = head_mask[:, None] & (d < HEAD_DIM)[None, :]
    turned = head_mask[:, None] & (d < ROT)[None, :]
    x = tl.load(start[:, None] + d[None, :], mask=mask, other=0.0)
    other = tl.load(start[:, None] + partner[None, :], mask=turned, other=0.0)
    dtype: tl.constexpr = x.dtype
    x, other = x.to(tl.float32), other.to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        w = tl.load(w_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        w_other = tl.load(w_ptr + partner, mask=d < ROT, other=0.0).to(tl.float32)[None, :]
        x, other = x * rstd, other * rstd
        if ONE_PLUS:
            x, other = x * (1.0 + w), other * (1.0 + w_other)
        else:
            x = x.to(dtype).to(tl.float32) * w
            other = other.to(dtype).to(tl.float32) * w_other
        x, other = x.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
    cos = tl.load(angles + angle, mask=d < ROT, other=1.0)[None, :]
    sin = tl.load(angles + half + angle, mask=d < ROT, other=0.0)[None, :]
    sign = tl.where(d < half, -1.0, 1.0)[None, :]
    return x * cos + other * sign * sin


@triton.jit
def _qk_norm_rope_cache_kernel(
    qkv_ptr,
    position_ptr,
    cos_sin_ptr,
    q_w_ptr,
    k_w_ptr,
    cache_ptr,
    slot_ptr,
    out_ptr,
    stride_token,
    stride_block,
    eps,
    inverse_k_scale,
    inverse_v_scale,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    ROT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens, query head tiles + kv head tiles)."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    start_next(PDL)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    row = qkv_ptr + token * stride_token
    # Both are fetched at once; what padding has for a position is not used.
    position = tl.load(position_ptr + token).to(tl.int64)
    await_previous(PDL)
    angles = cos_sin_ptr + tl.where(slot >= 0, position, 0) * ROT
    if tile < q_tiles:
        head = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < HEADS)[:, None] & (d < HEAD_DIM)
        q = _norm_rope(
            row + head * Q_WIDTH, head < HEADS, q_w_ptr, angles, eps,
            HEAD_DIM, ROT, BLOCK_D, NORM_Q, ONE_PLUS,
        )  # fmt: skip
        out = out_ptr + token * HEADS * HEAD_DIM
        tl.store(out + head[:, None] * HEAD_DIM + d, q, mask=mask)
    elif slot >= 0:
        head = (tile - q_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < KV_HEADS)[:, None] & (d < HEAD_DIM)
        keys = row + HEADS * Q_WIDTH + head * HEAD_DIM
        k = _norm_rope(
            keys, head < KV_HEADS, k_w_ptr, angles, eps,
            HEAD_DIM, ROT, BLOCK_D, NORM_K, ONE_PLUS,
        )  # fmt: skip
        v = tl.load(keys[:, None] + KV_HEADS * HEAD_DIM + d, mask=mask, other=0.0)
        cache = cache_ptr + (slot // BLOCK_SIZE) * stride_block
        cache += (slot % BLOCK_SIZE) * KV_HEADS * HEAD_DIM
        inner = head[:, None] * HEAD_DIM + d
        if FP8:
            k = to_fp8(k.to(v.dtype).to(tl.float32) * inverse_k_scale, FP8_MAX)
            v = to_fp8(v.to(tl.float32) * inverse_v_scale, FP8_MAX)
        tl.store(cache + inner, k, mask=mask)
        tl.store(cache + BLOCK_SIZE * KV_HEADS * HEAD_DIM + inner, v, mask=mask)


_qk_norm_rope_cache = Launcher(_qk_norm_rope_cache_kernel)


def qk_norm_rope_cache(p: RotaryProblem) -> Tensor:
    """Positions of padding rows are not used."""
    tokens, device = len(p.qkv), p.qkv.device
    q = torch.empty(tokens, p.num_heads, p.head_dim, dtype=p.qkv.dtype, device=device)
    if tokens == 0:
        return q
    block_d = next_power_of_2(p.head_dim)
    block_h = max(1, TILE_ELEMENTS // block_d)
    tiles = cdiv(p.num_heads, block_h) + cdiv(p.num_kv_heads, block_h)
    _qk_norm_rope_cache[(tokens, tiles)](
        p.qkv,
        p.positions,
        p.cos_sin,
        p.q_norm_weight,
        p.k_norm_weight,
        p.kv_cache,
        p.slot_mapping,
        q,
        p.qkv.stride(0),
        p.kv_cache.stride(0),
        p.eps,
        1 / p.k_scale,
        1 / p.v_scale,
        FP8=p.kv_cache.dtype is fp8.FP8,
        HEADS=p.num_heads,
        KV_HEADS=p.num_kv_heads,
        HEAD_DIM=p.head_dim,
        Q_WIDTH=p.head_dim * (2 if p.gated else 1),
        ROT=p.cos_sin.shape[-1],
        BLOCK_SIZE=p.kv_cache.shape[2],
        NORM_Q=p.q_norm_weight is not None,
        NORM_K=p.k_norm_weight is not None,
        ONE_PLUS=p.one_plus,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        **dependent_launch(device),
    )
    return q
