# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The gated delta rule token by token: the published function interface.

Memory-bound: each program holds a `[BV, dk]` slice of one state, read once and written once.
Both products of the old state are taken in one pass, since `S'^T q = e^g S^T q + (k.q) d`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.configs import device_configs
from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import inverse_norm
from vllm.model_executor.layers.fla.ops.gated_delta_rule.ragged_batch import flatten_batch
from vllm.utils.math_utils import cdiv, next_power_of_2


@triton.jit
def _recurrent_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    starts_ptr,
    out_ptr,
    scale,
    stride_qk,
    stride_v,
    stride_gate,
    stride_state,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    L2NORM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (dv tiles, value heads, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    dk = tl.arange(0, BK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = dk < DK, dv < DV
    inside = in_v[:, None] & in_k[None, :]
    stored = state_ptr + seq * stride_state + head * DV * DK + dv[:, None] * DK + dk[None, :]
    S = tl.load(stored, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    first = tl.load(starts_ptr + seq).to(tl.int64)
    count = (tl.load(starts_ptr + seq + 1) - first).to(tl.int32)
    for i in range(count):
        t = first + i
        column = (head // GROUP) * DK + dk
        q = tl.load(q_ptr + t * stride_qk + column, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + t * stride_qk + column, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + t * stride_v + head * DV + dv, mask=in_v, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + t * stride_gate + head).to(tl.float32)
        beta = tl.load(beta_ptr + t * stride_gate + head).to(tl.float32)
        q = q * (inverse_norm(q, L2NORM) * scale)
        k = k * inverse_norm(k, L2NORM)
        S = S * tl.exp(g)
        error = beta * (v - tl.sum(S * k[None, :], axis=1))
        o = tl.sum(S * q[None, :], axis=1) + tl.sum(k * q, axis=0) * error
        S += error[:, None] * k[None, :]
        tl.store(out_ptr + t * stride_v + head * DV + dv, o, mask=in_v)
    tl.store(stored, S, mask=inside, eviction_policy="evict_first")


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token; shapes and errors as in `chunk_gated_delta_rule`, no host read."""
    batch = flatten_batch(q, k, v, g, beta, initial_state, cu_seqlens)
    out = torch.empty_like(batch.v)
    _, heads, dv = batch.v.shape
    num_k_heads, dk = batch.k.shape[1:]
    tile = device_configs(q.device).gdn_decode
    block_v = min(tile.rows, next_power_of_2(dv))
    if num_seqs := len(batch.state_indices):
        _recurrent_kernel[(cdiv(dv, block_v), heads, num_seqs)](
            batch.q,
            batch.k,
            batch.v,
            batch.g,
            batch.beta,
            batch.state,
            batch.starts,
            out,
            dk**-0.5 if scale is None else scale,
            batch.q.stride(0),
            batch.v.stride(0),
            batch.g.stride(0),
            batch.state.stride(0),
            HEADS=heads,
            GROUP=heads // num_k_heads,
            DK=dk,
            DV=dv,
            L2NORM=use_qk_l2norm_in_kernel,
            BK=next_power_of_2(dk),
            BV=block_v,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    final = batch.state.mT.contiguous() if output_final_state else None
    return out.view(v.shape), final
