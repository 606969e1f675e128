# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Activations: SwiGLU's, the squared ReLU, and the attention output gate."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.norm.triton import row_tile, row_warps
from vllm.kernels.triton.dependent_launch import await_previous, dependent_launch, start_next
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import cdiv

COLUMNS = 1024


@triton.jit
def _silu_and_mul_kernel(
    in_ptr, out_ptr, stride_in, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    start_next(PDL)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    gate = tl.load(in_ptr + row * stride_in + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(in_ptr + row * stride_in + N + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + col, gate * tl.sigmoid(gate) * up, mask=mask)


_silu_and_mul = Launcher(_silu_and_mul_kernel)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, n, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, cdiv(n, COLUMNS))
        pdl = dependent_launch(out.device)
        _silu_and_mul[grid](gate_up, out, gate_up.stride(0), N=n, BLOCK=COLUMNS, **pdl)
    return out


@triton.jit
def _gelu_tanh_and_mul_kernel(
    in_ptr, out_ptr, stride_in, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """GELU's `(1 + tanh(u)) / 2` is `sigmoid(2u)`."""
    start_next(PDL)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    gate = tl.load(in_ptr + row * stride_in + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(in_ptr + row * stride_in + N + col, mask=mask, other=0.0).to(tl.float32)
    twice = gate * (1.59576912160573 + 0.0713548162726 * gate * gate)
    tl.store(out_ptr + row * N + col, gate * tl.sigmoid(twice) * up, mask=mask)


_gelu_tanh_and_mul = Launcher(_gelu_tanh_and_mul_kernel)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, n, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, cdiv(n, COLUMNS))
        pdl = dependent_launch(out.device)
        _gelu_tanh_and_mul[grid](gate_up, out, gate_up.stride(0), N=n, BLOCK=COLUMNS, **pdl)
    return out


@triton.jit
def clamped_gate(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """`clamped_swiglu` of fp32 tiles."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)


@triton.jit
def _clamped_swiglu_kernel(
    in_ptr, out_ptr, stride_in, N: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    gate = tl.load(in_ptr + row * stride_in + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(in_ptr + row * stride_in + N + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + col, clamped_gate(gate, up, ALPHA, LIMIT), mask=mask)


_clamped_swiglu = Launcher(_clamped_swiglu_kernel)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, n, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, cdiv(n, COLUMNS))
        _clamped_swiglu[grid](
            gate_up, out, gate_up.stride(0), N=n, ALPHA=alpha, LIMIT=limit, BLOCK=COLUMNS,
            **dependent_launch(out.device),
        )  # fmt: skip
    return out


@triton.jit
def _relu_squared_kernel(
    in_ptr, out_ptr, stride_in, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    start_next(PDL)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    x = tl.load(in_ptr + row * stride_in + col, mask=mask, other=0.0).to(tl.float32)
    # Of a NaN a maximum would be 0.
    x = tl.where(x < 0, 0.0, x)
    tl.store(out_ptr + row * N + col, x * x, mask=mask)


_relu_squared = Launcher(_relu_squared_kernel)


def relu_squared(x: Tensor) -> Tensor:
    tokens, n = x.shape
    out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    if tokens:
        grid = (tokens, cdiv(n, COLUMNS))
        pdl = dependent_launch(out.device)
        _relu_squared[grid](x, out, x.stride(0), N=n, BLOCK=COLUMNS, **pdl)
    return out


@triton.jit
def gated(x, gate):
    """`x * sigmoid(gate)` of two tiles in their own dtype, in fp32."""
    return x.to(tl.float32) * tl.sigmoid(gate.to(tl.float32))


@triton.jit(do_not_specialize=["rows"])
def _mul_sigmoid_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    rows,
    stride_token,
    stride_head,
    stride_gate_token,
    stride_gate_head,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (col < N)[None, :]
    token, head = row // HEADS, row % HEADS
    start = token * stride_token + head * stride_head
    x = tl.load(x_ptr + start[:, None] + col[None, :], mask=mask, other=0.0)
    start = token * stride_gate_token + head * stride_gate_head
    gate = tl.load(gate_ptr + start[:, None] + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + row[:, None] * N + col[None, :], gated(x, gate), mask=mask)


_mul_sigmoid = Launcher(_mul_sigmoid_kernel)


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    tokens, heads, n = x.shape
    out = torch.empty(tokens, heads * n, dtype=x.dtype, device=x.device)
    if tokens:
        block_r, block_n = row_tile(n)
        _mul_sigmoid[(cdiv(tokens * heads, block_r),)](
            x,
            gate,
            out,
            tokens * heads,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            HEADS=heads,
            N=n,
            BLOCK_R=block_r,
            BLOCK_N=block_n,
            num_warps=row_warps(block_n),
            **dependent_launch(out.device),
        )
    return out
