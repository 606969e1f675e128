# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What comes before a float8 product, made float8 in the same pass: one program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.fp8 import FP8, Fp8Rows
from vllm.kernels.fp8.quantize import inverse_scale, to_fp8
from vllm.kernels.norm.triton import added_norm
from vllm.utils.math_utils import next_power_of_2

FP8_MAX = tl.constexpr(torch.finfo(FP8).max)


@triton.jit
def _store_fp8(y, values, scale_ptr, mask):
    """Quantise one token's `y` (fp32) to `values`, and its scale."""
    amax = tl.max(tl.abs(y))
    tl.store(values, to_fp8(y * inverse_scale(amax, FP8_MAX), FP8_MAX), mask=mask)
    tl.store(scale_ptr, tl.where(amax > 0, tl.div_rn(amax, FP8_MAX), 1.0))


@triton.jit
def _silu_and_mul_kernel(
    in_ptr, out_ptr, scale_ptr, stride_in, N: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < N
    gate = tl.load(in_ptr + row * stride_in + col, mask=mask, other=0.0)
    up = tl.load(in_ptr + row * stride_in + N + col, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    y = (wide * tl.sigmoid(wide) * up).to(gate.dtype).to(tl.float32)
    _store_fp8(y, out_ptr + row * N + col, scale_ptr + row, mask)


def _empty_rows(tokens: int, n: int, like: Tensor) -> Fp8Rows:
    values = torch.empty(tokens, n, dtype=FP8, device=like.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=like.device)
    return Fp8Rows(values, scale, like.dtype)


def _warps(block: int) -> int:
    return min(8, max(4, block // 2048))


def silu_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = _empty_rows(tokens, n, gate_up)
    if tokens:
        block = next_power_of_2(n)
        _silu_and_mul_kernel[(tokens,)](
            gate_up, out.values, out.scale, gate_up.stride(0), N=n, BLOCK=block,
            num_warps=_warps(block),
        )  # fmt: skip
    return out


@triton.jit
def _fused_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    out_ptr,
    scale_ptr,
    sum_ptr,
    stride_x,
    stride_residual,
    eps,
    N: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = col < N
    w = tl.load(w_ptr + col, mask=mask, other=0.0).to(tl.float32)
    x_row, residual_row = x_ptr + row * stride_x, residual_ptr + row * stride_residual
    y = added_norm(x_row, residual_row, sum_ptr + row * N, w, col, mask, eps, N, ONE_PLUS)
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    _store_fp8(y, out_ptr + row * N + col, scale_ptr + row, mask)


def fused_add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
) -> tuple[Fp8Rows, Tensor]:
    tokens, n = x.shape
    out = _empty_rows(tokens, n, x)
    total = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    if tokens:
        block = next_power_of_2(n)
        _fused_add_rms_norm_kernel[(tokens,)](
            x,
            residual,
            weight,
            out.values,
            out.scale,
            total,
            x.stride(0),
            residual.stride(0),
            eps,
            N=n,
            ONE_PLUS=one_plus,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out, total
