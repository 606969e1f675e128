# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Matrix products of float8 rows with float8 weights, for what cuBLAS does not take.

`x [m, k]`, `weight [n, k]`, both e4m3 and dense along k; sums in fp32. With GROUP_K > 0 the scales
are per token and group (`[m, k / GROUP_K]`, any strides) and per weight row and group
(`[k / GROUP_K, n]`), applied to each group's sum (DeepSeek-V3, arXiv 2412.19437, section 3.3.2);
otherwise per token and per weight row, applied once.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.fp8 import GROUP
from vllm.utils.math_utils import cdiv

# Fits 96 KiB of shared memory.
MATMUL_TILE = (128, 128, 3, 8)


@triton.jit(do_not_specialize=["m", "stride_xs_group"])
def _matmul_kernel(
    x_ptr, w_ptr, xs_ptr, ws_ptr, bias_ptr, out_ptr, m, n, k,
    stride_x, stride_w, stride_xs_row, stride_xs_group, stride_ws_group, stride_out,
    GROUP_K: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    """Grid (output tiles,), `SUPER` row tiles at a time so that weights are reused from L2."""
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    per_super = SUPER * tiles_n
    first = pid // per_super * SUPER
    height = min(tiles_m - first, SUPER)
    row = (first + pid % per_super % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = pid % per_super // height * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, col_in = row < m, col < n
    safe_row, safe_col = tl.where(row_in, row, 0), tl.where(col_in, col, 0)
    kk = tl.arange(0, BLOCK_K)
    x_at = x_ptr + safe_row.to(tl.int64)[:, None] * stride_x + kk[None, :]
    w_at = w_ptr + safe_col.to(tl.int64)[None, :] * stride_w + kk[:, None]
    xs_at = xs_ptr + safe_row * stride_xs_row
    ws_at = ws_ptr + safe_col
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_at + start)
            w = tl.load(w_at + start)
        else:
            x = tl.load(x_at + start, mask=kk[None, :] < k - start, other=0.0)
            w = tl.load(w_at + start, mask=kk[:, None] < k - start, other=0.0)
        if GROUP_K > 0:
            group = start // GROUP_K
            xs = tl.load(xs_at + group * stride_xs_group)
            ws = tl.load(ws_at + group * stride_ws_group)
            acc += tl.dot(x, w) * xs[:, None] * ws[None, :]
        else:
            acc = tl.dot(x, w, acc)
    if GROUP_K == 0:
        acc = acc * tl.load(xs_at)[:, None] * tl.load(ws_at)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + safe_col).to(tl.float32)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * stride_out + col[None, :]
    tl.store(out_at, acc, mask=row_in[:, None] & col_in[None, :])


def matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: tuple[int, int, int, int] = MATMUL_TILE,
) -> None:
    """Fill `out [m, n]`; see the module docstring. `tile`: (rows, columns, stages, warps)."""
    m, n = out.shape
    k = weight.shape[1]
    grouped = weight_scale.dim() == 2
    block_m, block_n, stages, warps = tile
    _matmul_kernel[(cdiv(m, block_m) * cdiv(n, block_n),)](
        x, weight, x_scale, weight_scale, bias, out, m, n, k,
        x.stride(0), weight.stride(0), x_scale.stride(0), x_scale.stride(1),
        weight_scale.stride(0) if grouped else 0, out.stride(0),
        GROUP_K=GROUP if grouped else 0,
        BIAS=bias is not None,
        EVEN_K=k % GROUP == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=GROUP,
        SUPER=8,
        num_stages=stages,
        num_warps=warps,
    )  # fmt: skip
