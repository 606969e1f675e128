# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Recurrent gated delta rule: the decode kernel and the published function interface.

Memory-bound: each program holds a `[BV, dk]` slice of one state, read once and written once.
Both products of the old state are taken in one pass, since `S'^T q = e^g S^T q + (k.q) d`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.configs import device_configs
from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import gate, inverse_norm
from vllm.model_executor.layers.fla.ops.gated_delta_rule.ragged_batch import flatten_batch
from vllm.utils.math_utils import cdiv, next_power_of_2


@triton.jit
def _recurrent_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    index_ptr,
    starts_ptr,
    out_ptr,
    scale,
    stride_qkv,
    stride_v,
    stride_a,
    stride_b,
    stride_block,
    stride_out,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    GATES: tl.constexpr,
    L2NORM: tl.constexpr,
    RAGGED: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (dv tiles, value heads, sequences); without RAGGED one token per sequence."""
    head, seq = tl.program_id(1), tl.program_id(2)
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        return
    dk = tl.arange(0, BK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = dk < DK, dv < DV
    inside = in_v[:, None] & in_k[None, :]
    stored = state_ptr + index * stride_block + head * DV * DK + dv[:, None] * DK + dk[None, :]
    S = tl.load(stored, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    first, count = seq.to(tl.int64), 1
    if RAGGED:
        first = tl.load(starts_ptr + seq).to(tl.int64)
        count = (tl.load(starts_ptr + seq + 1) - first).to(tl.int32)
    for i in range(count):
        t = first + i
        column = (head // GROUP) * DK + dk
        q = tl.load(q_ptr + t * stride_qkv + column, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + t * stride_qkv + column, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + t * stride_v + head * DV + dv, mask=in_v, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + t * stride_a + head)
        b = tl.load(b_ptr + t * stride_b + head)
        g, beta = gate(a, b, A_log_ptr, dt_bias_ptr, head, GATES, 1.0)
        q = q * (inverse_norm(q, L2NORM) * scale)
        k = k * inverse_norm(k, L2NORM)
        S = S * tl.exp(g)
        error = beta * (v - tl.sum(S * k[None, :], axis=1))
        o = tl.sum(S * q[None, :], axis=1) + tl.sum(k * q, axis=0) * error
        S += error[:, None] * k[None, :]
        tl.store(out_ptr + t * stride_out + head * DV + dv, o, mask=in_v)
    tl.store(stored, S, mask=inside, eviction_policy="evict_first")


def run_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    ssm_state: Tensor,
    state_indices: Tensor,
    starts: Tensor | None,
    scale: float,
    l2norm: bool,
    out: Tensor,
) -> None:
    """Fill `out [tokens, v heads, dv]` and update the pool `ssm_state [blocks, v heads, dv, dk]`.

    `q, k [tokens, k heads, dk]` (equal token strides), `v [tokens, v heads, dv]`; `a, b` are gates
    when `A_log` is None. Without `starts`, sequence `i` is token `i`.
    """
    _, heads, dv = v.shape
    num_k_heads, dk = k.shape[1:]
    if len(state_indices) == 0:
        return
    tile = device_configs(v.device).gdn_decode
    block_v = min(tile.rows, next_power_of_2(dv))
    _recurrent_kernel[(cdiv(dv, block_v), heads, len(state_indices))](
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        ssm_state,
        state_indices,
        starts,
        out,
        scale,
        q.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        ssm_state.stride(0),
        out.stride(0),
        HEADS=heads,
        GROUP=heads // num_k_heads,
        DK=dk,
        DV=dv,
        GATES=A_log is not None,
        L2NORM=l2norm,
        RAGGED=starts is not None,
        BK=next_power_of_2(dk),
        BV=block_v,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


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
    run_recurrent(
        batch.q,
        batch.k,
        batch.v,
        batch.g,
        batch.beta,
        None,
        None,
        batch.state,
        batch.state_indices,
        batch.starts,
        k.shape[-1] ** -0.5 if scale is None else scale,
        use_qk_l2norm_in_kernel,
        out,
    )
    final = batch.state.mT.contiguous() if output_final_state else None
    return out.view(v.shape), final
