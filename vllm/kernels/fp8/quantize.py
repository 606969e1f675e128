# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Activations to float8 e4m3 with one scale per token, or per token and 128 channels.

The arithmetic is that of `vllm.kernels.fp8`, value for value: one fp32 division per scale and one
fp32 product per element, rounded to nearest even.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.fp8 import FP8, GROUP, padded_rows
from vllm.utils.math_utils import cdiv, next_power_of_2


@triton.jit
def inverse_scale(amax, FP8_MAX: tl.constexpr):
    """What to multiply by so that `amax` becomes the largest float8; 1 for zeros."""
    return tl.where(amax > 0, tl.div_rn(FP8_MAX, amax), 1.0)


@triton.jit
def to_fp8(x, FP8_MAX: tl.constexpr):
    """Round fp32 to e4m3, saturating; NaN stays NaN."""
    return tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _quantize_rows_kernel(
    x_ptr, fixed_ptr, q_ptr, scale_ptr, stride_x,
    FIXED: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < K
    x = tl.load(x_ptr + row * stride_x + col, mask=mask, other=0.0).to(tl.float32)
    if FIXED:
        scale = tl.load(fixed_ptr)
        x = tl.div_rn(x, scale)
    else:
        amax = tl.max(tl.abs(x), axis=0)
        scale = tl.where(amax > 0, tl.div_rn(amax, FP8_MAX), 1.0)
        x = x * inverse_scale(amax, FP8_MAX)
    tl.store(q_ptr + row * K + col, to_fp8(x, FP8_MAX), mask=mask)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: Tensor, fixed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x [tokens, k]` -> `(e4m3 [tokens, k], scale [tokens, 1] fp32)`; `fixed [1]`: every scale."""
    tokens, k = x.shape
    q = torch.empty(tokens, k, dtype=FP8, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    if tokens:
        block = next_power_of_2(k)
        _quantize_rows_kernel[(tokens,)](
            x,
            fixed,
            q,
            scale,
            x.stride(0),
            FIXED=fixed is not None,
            K=k,
            BLOCK=block,
            FP8_MAX=torch.finfo(FP8).max,
            num_warps=min(8, max(4, block // 2048)),
        )
    return q, scale


@triton.jit(do_not_specialize=["rows", "padded"])
def _quantize_groups_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    rows,
    padded,
    stride_x,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_K: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    """Grid (row tiles, groups); rows past `rows` become zeros."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.program_id(1)
    col = group * GROUP_K + tl.arange(0, GROUP_K)
    inside = (row < rows)[:, None] & (col < K)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + col[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    q = to_fp8(x * inverse_scale(amax, FP8_MAX)[:, None], FP8_MAX)
    stored = (row < padded)[:, None] & (col < K)[None, :]
    tl.store(q_ptr + row[:, None] * K + col[None, :], q, mask=stored)
    scale = tl.where(amax > 0, tl.div_rn(amax, FP8_MAX), 1.0)
    tl.store(scale_ptr + group * padded + row, scale, mask=row < padded)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [tokens, k]` -> `(e4m3 [padded, k], scale [padded, groups] fp32)`.

    Groups are 128 channels. `padded` is `tokens` rounded up to a multiple of 4 and the scales lie
    token by token (stride 1), as cuBLAS wants them; the rows beyond `tokens` are zeros.
    """
    tokens, k = x.shape
    padded, groups = padded_rows(tokens), cdiv(k, GROUP)
    q = torch.empty(padded, k, dtype=FP8, device=x.device)
    scale = torch.empty(groups, padded, dtype=torch.float32, device=x.device)
    if tokens:
        block_r = 16 if tokens > 64 else 4
        _quantize_groups_kernel[(cdiv(padded, block_r), groups)](
            x,
            q,
            scale,
            tokens,
            padded,
            x.stride(0),
            K=k,
            BLOCK_R=block_r,
            GROUP_K=GROUP,
            FP8_MAX=torch.finfo(FP8).max,
            num_warps=4 if block_r == 16 else 1,
        )
    return q, scale.t()
