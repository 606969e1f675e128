# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Within-chunk part of the chunked gated delta rule (arXiv 2412.06464, section 3.3).

Per chunk and value head: gates and their running sum `G`, `A = tril(beta k k^T exp(Gi - Gj), -1)`,
`T = (I + A)^-1`, `W = T (beta exp(G) k)` and `U = T (beta v)`. Keys stay unnormalised in memory;
their inverse norm multiplies the products, so no normalised copy is made.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.configs import device_configs
from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import (
    chunk_bounds,
    gate,
    inverse_norm,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.inverse import invert_unit_lower
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import CHUNK, ChunkedProblem


@triton.jit
def _intra_chunk_kernel(
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    chunk_ptr,
    scratch_ptr,
    w_ptr,
    u_ptr,
    g_ptr,
    k_scale_ptr,
    stride_k,
    stride_v,
    stride_a,
    stride_b,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    GATES: tl.constexpr,
    L2NORM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (chunks, value heads)."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, length = chunk_bounds(chunk_ptr, starts_ptr, chunk, BT)
    t = tl.arange(0, BT)
    valid = t < length
    row = start * HEADS + t * HEADS + head
    a = tl.load(a_ptr + start * stride_a + t * stride_a + head, mask=valid, other=0.0)
    b = tl.load(b_ptr + start * stride_b + t * stride_b + head, mask=valid, other=0.0)
    g, beta = gate(a, b, A_log_ptr, dt_bias_ptr, head, GATES)
    total = tl.cumsum(tl.where(valid, g, 0.0), axis=0)
    beta = tl.where(valid, beta, 0.0)
    tl.store(g_ptr + row, total, mask=valid)

    dk, dv = tl.arange(0, BK), tl.arange(0, BV)
    in_k = valid[:, None] & (dk < DK)[None, :]
    in_v = valid[:, None] & (dv < DV)[None, :]
    k_row = k_ptr + start * stride_k + (head // GROUP) * DK
    k = tl.load(k_row + t[:, None] * stride_k + dk[None, :], mask=in_k, other=0.0)
    k_scale = inverse_norm(k, L2NORM)
    tl.store(k_scale_ptr + row, k_scale, mask=valid)
    exponent = total[:, None] - total[None, :]
    decay = tl.exp(tl.where(t[:, None] > t[None, :], exponent, float("-inf")))
    A = tl.dot(k, tl.trans(k), input_precision="tf32x3") * decay
    A = A * (beta * k_scale)[:, None] * k_scale[None, :]
    scratch = scratch_ptr + (chunk * HEADS + head) * BT * BT
    tl.store(scratch + t[:, None] * BT + t[None, :], A)
    T = invert_unit_lower(scratch).to(k.dtype)

    weighted = k.to(tl.float32) * (beta * k_scale * tl.exp(total))[:, None]
    w = tl.dot(T, weighted.to(k.dtype), input_precision="tf32x3")
    tl.store(w_ptr + row[:, None] * DK + dk[None, :], w, mask=in_k)
    v_row = v_ptr + start * stride_v + head * DV
    v = tl.load(v_row + t[:, None] * stride_v + dv[None, :], mask=in_v, other=0.0)
    weighted = (v.to(tl.float32) * beta[:, None]).to(k.dtype)
    u = tl.dot(T, weighted, input_precision="tf32x3")
    tl.store(u_ptr + row[:, None] * DV + dv[None, :], u, mask=in_v)


def intra_chunk(p: ChunkedProblem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`W [tokens, heads, dk]`, `U [tokens, heads, dv]` in the activation dtype, `G` and the keys'
    inverse norms `[tokens, heads]` fp32."""
    configs = device_configs(p.v.device)
    tokens, heads, dv = p.v.shape
    w = p.v.new_empty(tokens, heads, p.head_k_dim)
    u = p.v.new_empty(tokens, heads, dv)
    g, k_scale = torch.empty(2, tokens, heads, dtype=torch.float32, device=p.v.device)
    scratch = torch.empty(p.num_chunks, heads, CHUNK, CHUNK, dtype=torch.float32, device=p.v.device)
    _intra_chunk_kernel[(p.num_chunks, heads)](
        p.k,
        p.v,
        p.a,
        p.b,
        p.A_log,
        p.dt_bias,
        p.query_start_loc,
        p.chunk_indices,
        scratch,
        w,
        u,
        g,
        k_scale,
        p.k.stride(0),
        p.v.stride(0),
        p.a.stride(0),
        p.b.stride(0),
        HEADS=heads,
        GROUP=p.group,
        DK=p.head_k_dim,
        DV=dv,
        GATES=p.A_log is not None,
        L2NORM=p.l2norm,
        BK=p.block_k,
        BV=p.block_v,
        BT=CHUNK,
        num_warps=configs.gdn_fp32_warps if p.wide else configs.gdn_intra.num_warps,
    )
    return w, u, g, k_scale
