# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Output of the chunked gated delta rule: `O = exp(G) Q S + tril(Q K^T exp(Gi - Gj)) V'`.

The token tile is the chunk: chunk lengths are masked, so results and compiled kernels do not
depend on how many tokens a batch has.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.configs import device_configs
from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import chunk_bounds, inverse_norm
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import CHUNK, ChunkedProblem


@triton.jit
def _chunk_output_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    k_scale_ptr,
    h_ptr,
    out_ptr,
    starts_ptr,
    chunk_ptr,
    scale,
    stride_q,
    stride_k,
    stride_out,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    L2NORM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (dv tiles, value heads, chunks)."""
    head, chunk = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, length = chunk_bounds(chunk_ptr, starts_ptr, chunk, BT)
    t, dk = tl.arange(0, BT), tl.arange(0, BK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    valid = t < length
    in_k = valid[:, None] & (dk < DK)[None, :]
    in_v = valid[:, None] & (dv < DV)[None, :]
    row = start * HEADS + t * HEADS + head
    columns = (head // GROUP) * DK + dk[None, :]
    q = tl.load(q_ptr + start * stride_q + t[:, None] * stride_q + columns, mask=in_k, other=0.0)
    k = tl.load(k_ptr + start * stride_k + t[:, None] * stride_k + columns, mask=in_k, other=0.0)
    h_row = h_ptr + (chunk * HEADS + head) * DK * DV
    in_h = (dk < DK)[:, None] & (dv < DV)[None, :]
    h = tl.load(h_row + dk[:, None] * DV + dv[None, :], mask=in_h, other=0.0)
    v = tl.load(v_ptr + row[:, None] * DV + dv[None, :], mask=in_v, other=0.0)
    g = tl.load(g_ptr + row, mask=valid, other=0.0)
    k_scale = tl.load(k_scale_ptr + row, mask=valid, other=0.0)
    decay = tl.exp(tl.where(t[:, None] >= t[None, :], g[:, None] - g[None, :], float("-inf")))
    p = tl.dot(q, tl.trans(k), input_precision="tf32x3") * decay * k_scale[None, :]
    o = tl.dot(q, h, input_precision="tf32x3") * tl.exp(g)[:, None]
    o += tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
    o = o * (inverse_norm(q, L2NORM) * scale)[:, None]
    out = out_ptr + start * stride_out + head * DV
    tl.store(out + t[:, None] * stride_out + dv[None, :], o, mask=in_v)


def chunk_output(
    p: ChunkedProblem, v_new: Tensor, g: Tensor, k_scale: Tensor, h: Tensor, out: Tensor
) -> None:
    """Fill `out [tokens, heads, dv]` (dense heads, any token stride) from the state pass."""
    _, heads, dv = p.v.shape
    configs = device_configs(p.v.device)
    tile = configs.gdn_output
    width = tile.columns * 2 // max(2, p.v.element_size()) * 128 // max(128, p.block_k)
    block_v = max(16, min(width, p.block_v))
    _chunk_output_kernel[(triton.cdiv(dv, block_v), heads, p.num_chunks)](
        p.q,
        p.k,
        v_new,
        g,
        k_scale,
        h,
        out,
        p.query_start_loc,
        p.chunk_indices,
        p.scale,
        p.q.stride(0),
        p.k.stride(0),
        out.stride(0),
        HEADS=heads,
        GROUP=p.group,
        DK=p.head_k_dim,
        DV=dv,
        L2NORM=p.l2norm,
        BK=p.block_k,
        BV=block_v,
        BT=CHUNK,
        num_warps=configs.gdn_fp32_warps if p.wide else tile.num_warps,
        num_stages=tile.num_stages,
    )
