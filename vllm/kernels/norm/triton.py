# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""RMS norms: plain, with the residual addition, and gated per head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.dependent_launch import await_previous, dependent_launch, start_next
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import cdiv, next_power_of_2

ROW_TILE_ELEMENTS = 1024


def row_tile(width: int) -> tuple[int, int]:
    """`(rows, columns)` of a tile: the padded row, and enough short rows to fill a program."""
    columns = next_power_of_2(width)
    return max(1, ROW_TILE_ELEMENTS // columns), columns


def row_warps(columns: int) -> int:
    """At most 16 elements of a row per thread, within 4 to 16 warps."""
    return min(16, max(4, columns // 512))


@triton.jit
def _normalise(x, n: tl.constexpr, eps):
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / n + eps)[:, None]


@triton.jit
def _weigh(y, w, dtype: tl.constexpr, ONE_PLUS: tl.constexpr):
    if ONE_PLUS:
        return y * (1.0 + w)
    return y.to(dtype).to(tl.float32) * w


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    rows,
    stride_token,
    stride_head,
    eps,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (col < N)[None, :]
    start = (row // HEADS) * stride_token + (row % HEADS) * stride_head
    start_next(PDL)
    w = tl.load(w_ptr + col, mask=col < N, other=0.0).to(tl.float32)
    await_previous(PDL)
    x = tl.load(x_ptr + start[:, None] + col[None, :], mask=mask, other=0.0)
    y = _weigh(_normalise(x.to(tl.float32), N, eps), w[None, :], x.dtype, ONE_PLUS)
    tl.store(out_ptr + row[:, None] * N + col[None, :], y, mask=mask)


_rms_norm = Launcher(_rms_norm_kernel)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
    """More than one leading head dimension is flattened first."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    n = x.shape[-1]
    view = x.reshape(1, 1, n) if x.ndim == 1 else x.reshape(len(x), -1, n)
    rows = view.shape[0] * view.shape[1]
    block_r, block_n = row_tile(n)
    _rms_norm[(cdiv(rows, block_r),)](
        view,
        weight,
        out,
        rows,
        view.stride(0),
        view.stride(1),
        eps,
        HEADS=view.shape[1],
        N=n,
        ONE_PLUS=one_plus,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        num_warps=row_warps(block_n),
        **dependent_launch(x.device),
    )
    return out


@triton.jit
def normed_row(x, w, N: tl.constexpr, eps, ONE_PLUS: tl.constexpr):
    """The norm of a row `[1, N]`, in fp32 and not rounded; `w [1, N]` in fp32."""
    return _weigh(_normalise(x.to(tl.float32), N, eps), w, x.dtype, ONE_PLUS)


@triton.jit
def added_norm(
    x_row, residual_row, sum_row, w, col, mask, eps, N: tl.constexpr, ONE_PLUS: tl.constexpr
):  # fmt: skip
    """The norm of a row of `x + residual`, in fp32 and not rounded; the sum goes to `sum_row`."""
    x = tl.load(x_row + col, mask=mask, other=0.0)
    residual = tl.load(residual_row + col, mask=mask, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(sum_row + col, total, mask=mask)
    return normed_row(total, w, N, eps, ONE_PLUS)


@triton.jit
def _fused_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    out_ptr,
    sum_ptr,
    stride_x,
    stride_residual,
    eps,
    N: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_N)[None, :]
    mask = col < N
    start_next(PDL)
    w = tl.load(w_ptr + col, mask=mask, other=0.0).to(tl.float32)
    await_previous(PDL)
    x_row, residual_row = x_ptr + row * stride_x, residual_ptr + row * stride_residual
    y = added_norm(x_row, residual_row, sum_ptr + row * N, w, col, mask, eps, N, ONE_PLUS)
    tl.store(out_ptr + row * N + col, y, mask=mask)


_fused_add_rms_norm = Launcher(_fused_add_rms_norm_kernel)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    tokens, n = x.shape
    out, total = (torch.empty(tokens, n, dtype=x.dtype, device=x.device) for _ in range(2))
    if tokens:
        block_n = next_power_of_2(n)
        _fused_add_rms_norm[(tokens,)](
            x,
            residual,
            weight,
            out,
            total,
            x.stride(0),
            residual.stride(0),
            eps,
            N=n,
            ONE_PLUS=one_plus,
            BLOCK_N=block_n,
            num_warps=row_warps(block_n),
            **dependent_launch(x.device),
        )
    return out, total


@triton.jit(do_not_specialize=["rows", "num_done"])
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    w_ptr,
    out_ptr,
    done_ptr,
    rows,
    num_done,
    stride_token,
    stride_head,
    stride_gate_token,
    stride_gate_head,
    eps,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (col < N)[None, :]
    token, head = row // HEADS, row % HEADS
    start = token * stride_token + head * stride_head
    start_next(PDL)
    if done_ptr is not None:
        done = tl.load(done_ptr + token, mask=(row < rows) & (token < num_done), other=-1)
        mask &= (done < 0)[:, None]
    w = tl.load(w_ptr + col, mask=col < N, other=0.0)
    await_previous(PDL)
    x = tl.load(x_ptr + start[:, None] + col[None, :], mask=mask, other=0.0)
    start = token * stride_gate_token + head * stride_gate_head
    gate = tl.load(gate_ptr + start[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    y = _weigh(_normalise(x.to(tl.float32), N, eps), w.to(tl.float32)[None, :], x.dtype, False)
    if w.dtype == x.dtype:
        y = y.to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row[:, None] * N + col[None, :], y * gate * tl.sigmoid(gate), mask=mask)


_gated_rms_norm = Launcher(_gated_rms_norm_kernel)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    done: Tensor | None = None,
) -> Tensor:
    tokens, heads, n = x.shape
    if out is None:
        out = torch.empty(tokens, heads * n, dtype=x.dtype, device=x.device)
    if tokens:
        block_r, block_n = row_tile(n)
        _gated_rms_norm[(cdiv(tokens * heads, block_r),)](
            x,
            gate,
            weight,
            out,
            done,
            tokens * heads,
            0 if done is None else done.shape[0],
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            eps,
            HEADS=heads,
            N=n,
            BLOCK_R=block_r,
            BLOCK_N=block_n,
            num_warps=row_warps(block_n),
            **dependent_launch(x.device),
        )
    return out.view(tokens, heads * n)
