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
def _normalised(x, w_ptr, d, mask, rstd, dtype, ONE_PLUS: tl.constexpr):
    """Dims `d` of heads, `[heads, dims]` fp32, rounded to `dtype` as a norm of its own does."""
    w = tl.load(w_ptr + d, mask=mask, other=0.0).to(tl.float32)[None, :]
    if ONE_PLUS:
        x = x * rstd * (1.0 + w)
    else:
        x = (x * rstd).to(dtype).to(tl.float32) * w
    return x.to(dtype).to(tl.float32)


@triton.jit
def _store(to, x, mask, dtype, inverse_scale, FP8: tl.constexpr):
    if FP8:
        x = to_fp8(x.to(dtype).to(tl.float32) * inverse_scale, FP8_MAX)
    tl.store(to, x, mask=mask)


@triton.jit
def _norm_and_turn_part(
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
    """Heads at pointers `start [heads]` -> normalised and rotated `[heads, BLOCK_D]` fp32, of whose
    dims the first ROT turn.

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
        x = _normalised(x, w_ptr, d, d < HEAD_DIM, rstd, dtype, ONE_PLUS)
        other = _normalised(other, w_ptr, partner, d < ROT, rstd, dtype, ONE_PLUS)
    cos = tl.load(angles + angle, mask=d < ROT, other=1.0)[None, :]
    sin = tl.load(angles + half + angle, mask=d < ROT, other=0.0)[None, :]
    sign = tl.where(d < half, -1.0, 1.0)[None, :]
    return x * cos + other * sign * sin


@triton.jit
def _norm_and_turn_whole(
    start, head_mask, w_ptr, angles, eps,
    HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    """As `_norm_and_turn_part`, of heads that turn as a whole: the two halves of their dims, each
    `[heads, BLOCK_R]`. A dim meets its partner in one thread, so neither is made twice."""
    half: tl.constexpr = HEAD_DIM // 2
    r = tl.arange(0, BLOCK_R)
    turns = r < half
    mask = head_mask[:, None] & turns[None, :]
    a = tl.load(start[:, None] + r[None, :], mask=mask, other=0.0)
    b = tl.load(start[:, None] + half + r[None, :], mask=mask, other=0.0)
    dtype: tl.constexpr = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / HEAD_DIM + eps)[:, None]
        a = _normalised(a, w_ptr, r, turns, rstd, dtype, ONE_PLUS)
        b = _normalised(b, w_ptr, half + r, turns, rstd, dtype, ONE_PLUS)
    cos = tl.load(angles + r, mask=turns, other=1.0)[None, :]
    sin = tl.load(angles + half + r, mask=turns, other=0.0)[None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _norm_rope(
    start,
    to,
    head_mask,
    w_ptr,
    angles,
    eps,
    inverse_scale,
    FP8: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
):
    """Heads at pointers `start [heads]`, normalised and rotated, to pointers `to [heads]`."""
    dtype: tl.constexpr = start.dtype.element_ty
    if ROT == HEAD_DIM:
        r = tl.arange(0, BLOCK_R)[None, :]
        first, second = _norm_and_turn_whole(
            start, head_mask, w_ptr, angles, eps, HEAD_DIM, BLOCK_R, NORM, ONE_PLUS
        )
        mask = head_mask[:, None] & (r < HEAD_DIM // 2)
        _store(to[:, None] + r, first, mask, dtype, inverse_scale, FP8)
        _store(to[:, None] + HEAD_DIM // 2 + r, second, mask, dtype, inverse_scale, FP8)
    else:
        d = tl.arange(0, BLOCK_D)[None, :]
        x = _norm_and_turn_part(
            start, head_mask, w_ptr, angles, eps, HEAD_DIM, ROT, BLOCK_D, NORM, ONE_PLUS
        )
        _store(to[:, None] + d, x, head_mask[:, None] & (d < HEAD_DIM), dtype, inverse_scale, FP8)


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
    BLOCK_R: tl.constexpr,
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
        out = out_ptr + token * HEADS * HEAD_DIM + head * HEAD_DIM
        _norm_rope(
            row + head * Q_WIDTH, out, head < HEADS, q_w_ptr, angles, eps, 1.0, False,
            HEAD_DIM, ROT, BLOCK_D, BLOCK_R, NORM_Q, ONE_PLUS,
        )  # fmt: skip
    elif slot >= 0:
        head = (tile - q_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < KV_HEADS)[:, None] & (d < HEAD_DIM)
        keys = row + HEADS * Q_WIDTH + head * HEAD_DIM
        v = tl.load(keys[:, None] + KV_HEADS * HEAD_DIM + d, mask=mask, other=0.0)
        cache = cache_ptr + (slot // BLOCK_SIZE) * stride_block
        cache += (slot % BLOCK_SIZE) * KV_HEADS * HEAD_DIM + head * HEAD_DIM
        _norm_rope(
            keys, cache, head < KV_HEADS, k_w_ptr, angles, eps, inverse_k_scale, FP8,
            HEAD_DIM, ROT, BLOCK_D, BLOCK_R, NORM_K, ONE_PLUS,
        )  # fmt: skip
        cache += BLOCK_SIZE * KV_HEADS * HEAD_DIM
        dtype: tl.constexpr = v.dtype
        _store(cache[:, None] + d, v, mask, dtype, inverse_v_scale, FP8)


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
        BLOCK_R=next_power_of_2(max(1, p.cos_sin.shape[-1] // 2)),
        **dependent_launch(device),
    )
    return q
