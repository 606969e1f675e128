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


_SILU, _GELU_TANH, _CLAMPED, _RELU_SQUARED = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def clamped_gate(
    gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """`clamped_swiglu` of fp32 tiles."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate * tl.sigmoid(ALPHA * gate) * (up + OFFSET)


@triton.jit
def _activation_kernel(
    in_ptr, out_ptr, stride_in, KIND: tl.constexpr, N: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, columns). The gate, or all there is, comes first in a row."""
    start_next(PDL)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    gate = tl.load(in_ptr + row * stride_in + col, mask=mask, other=0.0).to(tl.float32)
    if KIND == _RELU_SQUARED:
        # Of a NaN a maximum would be 0.
        gate = tl.where(gate < 0, 0.0, gate)
        y = gate * gate
    else:
        up = tl.load(in_ptr + row * stride_in + N + col, mask=mask, other=0.0).to(tl.float32)
        if KIND == _CLAMPED:
            y = clamped_gate(gate, up, ALPHA, LIMIT, OFFSET)
        elif KIND == _GELU_TANH:
            # GELU's `(1 + tanh(u)) / 2` is `sigmoid(2u)`.
            twice = gate * (1.59576912160573 + 0.0713548162726 * gate * gate)
            y = gate * tl.sigmoid(twice) * up
        else:
            y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * N + col, y, mask=mask)


_activation = Launcher(_activation_kernel)


def _activate(
    x: Tensor,
    kind: tl.constexpr,
    n: int,
    alpha: float = 0.0,
    limit: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    """`[tokens, n]` from `x [tokens, n or 2n]`."""
    out = torch.empty(len(x), n, dtype=x.dtype, device=x.device)
    if len(x):
        _activation[(len(x), cdiv(n, COLUMNS))](
            x, out, x.stride(0),
            KIND=kind.value, N=n, ALPHA=alpha, LIMIT=limit, OFFSET=offset, BLOCK=COLUMNS,
            **dependent_launch(x.device),
        )  # fmt: skip
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _activate(gate_up, _SILU, gate_up.shape[1] // 2)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _activate(gate_up, _GELU_TANH, gate_up.shape[1] // 2)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, offset: float) -> Tensor:
    return _activate(gate_up, _CLAMPED, gate_up.shape[1] // 2, alpha, limit, offset)


def relu_squared(x: Tensor) -> Tensor:
    return _activate(x, _RELU_SQUARED, x.shape[1])


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
