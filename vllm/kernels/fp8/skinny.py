# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Float8 weights streamed past few float8 tokens; arguments as in `fp8_linear`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.fp8 import GROUP
from vllm.utils.math_utils import cdiv, next_power_of_2

# The fastest of those measured on an H200 at the sizes of a 4B model; they fit 96 KiB of shared
# memory.
SKINNY_TILE = (64, 256, 4, 4)
VECTOR_TILE = (4, 512, 2, 4)


@triton.jit(do_not_specialize=["m", "stride_xs_group", "stride_split"])
def _skinny_kernel(
    x_ptr, w_ptr, xs_ptr, ws_ptr, bias_ptr, out_ptr, m, n, k, per_split,
    stride_x, stride_w, stride_xs_row, stride_xs_group, stride_ws_group, stride_split, stride_out,
    GROUP_K: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (weight row tiles, splits): weights stream through once, tokens are the short side.

    With SPLIT the output is `[splits, m, n]` fp32, before row scales and bias.
    """
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    kk = tl.arange(0, BLOCK_K)
    row_in, col_in = row < m, col < n
    safe_row, safe_col = tl.where(row_in, row, 0), tl.where(col_in, col, 0)
    w_at = w_ptr + safe_col.to(tl.int64)[:, None] * stride_w + kk[None, :]
    x_at = x_ptr + safe_row[None, :] * stride_x + kk[:, None]
    first = tl.program_id(1) * per_split
    last = tl.minimum(first + per_split, k)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, last, BLOCK_K):
        if EVEN_K:
            w = tl.load(w_at + start)
            x = tl.load(x_at + start)
        else:
            w = tl.load(w_at + start, mask=kk[None, :] < k - start, other=0.0)
            x = tl.load(x_at + start, mask=kk[:, None] < k - start, other=0.0)
        if GROUP_K > 0:
            group = start // GROUP_K
            xs = tl.load(xs_ptr + safe_row * stride_xs_row + group * stride_xs_group)
            ws = tl.load(ws_ptr + safe_col + group * stride_ws_group)
            acc += tl.dot(w, x) * ws[:, None] * xs[None, :]
        else:
            acc = tl.dot(w, x, acc)
    inside = col_in[:, None] & row_in[None, :]
    if SPLIT:
        place = out_ptr + tl.program_id(1) * stride_split
        tl.store(place + row[None, :] * stride_out + col[:, None], acc, mask=inside)
    else:
        if GROUP_K == 0:
            scale = tl.load(xs_ptr + safe_row * stride_xs_row)
            acc = acc * scale[None, :] * tl.load(ws_ptr + safe_col)[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + safe_col).to(tl.float32)[:, None]
        tl.store(out_ptr + row[None, :] * stride_out + col[:, None], acc, mask=inside)


@triton.jit(do_not_specialize=["stride_split"])
def _join_kernel(
    part_ptr, xs_ptr, ws_ptr, bias_ptr, out_ptr, n, stride_split, stride_xs, stride_out,
    SPLITS: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (columns, tokens): splits in order, then scales and bias."""
    row = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(part_ptr + split * stride_split + row * n + col, mask=mask, other=0.0)
    if not GROUPED:
        acc *= tl.load(xs_ptr + row * stride_xs) * tl.load(ws_ptr + col, mask=mask, other=0.0)
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + col, acc, mask=mask)


def skinny_matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: tuple[int, int, int, int] = SKINNY_TILE,
    programs: int = 132,
) -> None:
    """As `fp8_linear.matmul` for at most 64 rows. `tile`: (weight rows, k, stages, warps).

    Narrow weights are split along k until about `programs` programs stream them; how does not
    depend on the rows.
    """
    m, n = out.shape
    k = weight.shape[1]
    grouped = weight_scale.dim() == 2
    block_n, block_k, stages, warps = tile
    splits = max(1, min(programs // cdiv(n, block_n), k // (4 * block_k)))
    block_k = GROUP if grouped else block_k
    per_split = cdiv(cdiv(k, splits), block_k) * block_k
    block_m = max(16, next_power_of_2(m))
    part = out
    if splits > 1:
        part = torch.empty(splits, m, n, dtype=torch.float32, device=out.device)
    _skinny_kernel[(cdiv(n, block_n), splits)](
        x, weight, x_scale, weight_scale, bias, part, m, n, k, per_split,
        x.stride(0), weight.stride(0), x_scale.stride(0), x_scale.stride(1),
        weight_scale.stride(0) if grouped else 0, m * n, n if splits > 1 else out.stride(0),
        GROUP_K=GROUP if grouped else 0,
        BIAS=bias is not None,
        SPLIT=splits > 1,
        EVEN_K=k % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        # More tokens leave room for fewer tiles.
        num_stages=stages if block_m <= 32 else stages - 1,
        num_warps=warps,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(cdiv(n, 1024), m)](
            part, x_scale, weight_scale, bias, out, n, m * n, x_scale.stride(0), out.stride(0),
            SPLITS=splits, GROUPED=grouped, BIAS=bias is not None, BLOCK=1024,
        )  # fmt: skip


@triton.jit
def _vector_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, n, stride_w,
    K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token, without tensor cores: a few weight rows per program."""
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_in = col < n
    safe_col = tl.where(col_in, col, 0)
    kk = tl.arange(0, BLOCK_K)
    w_at = w_ptr + safe_col.to(tl.int64)[:, None] * stride_w + kk[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_at + start)
            x = tl.load(x_ptr + start + kk)
        else:
            w = tl.load(w_at + start, mask=kk[None, :] < K - start, other=0.0)
            x = tl.load(x_ptr + start + kk, mask=kk < K - start, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, axis=1) * (tl.load(xs_ptr) * tl.load(ws_ptr + safe_col))
    if BIAS:
        y += tl.load(bias_ptr + safe_col).to(tl.float32)
    tl.store(out_ptr + col, y, mask=col_in)


def vector_matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: tuple[int, int, int, int] = VECTOR_TILE,
) -> None:
    """As `fp8_linear.matmul` for one token and row scales.

    `tile`: (weight rows, k, warps, stages).
    """
    n, k = weight.shape
    block_n, block_k, warps, stages = tile
    _vector_kernel[(cdiv(n, block_n),)](
        x, x_scale, weight, weight_scale, bias, out, n, weight.stride(0),
        K=k,
        BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
