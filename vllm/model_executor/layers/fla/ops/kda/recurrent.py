# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Prefills of Kimi delta attention, token by token: a program keeps some rows of one state."""

import triton
import triton.language as tl

from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import softplus
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill
from vllm.utils.math_utils import cdiv, next_power_of_2

#: rows (dv) of a program's tile of the state
_ROWS = 16


@triton.jit
def _inverse_norm(x):
    """`rsqrt(sum(x^2) + 1e-6)` with the same bits in every thread.

    Of a plain product the compiler fuses a thread's own square with the sum of the others', so that
    threads differ in the last bit, and what one of them keeps in a journal from what another used.
    """
    return tl.rsqrt(tl.sum(tl.fma(x, x, tl.zeros_like(x)), axis=0) + 1e-6)


@triton.jit
def log_decay(a, A_log_ptr, dt_bias_ptr, head, dk, in_k, DK: tl.constexpr):
    """`-exp(A_log) * softplus(a + dt_bias)` of one head's key channels, fp32."""
    A_log = tl.load(A_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head * DK + dk, mask=in_k, other=0.0).to(tl.float32)
    return -tl.exp(A_log) * softplus(a.to(tl.float32) + dt_bias)


@triton.jit
def recurrent_step(
    S, q, k, v, a, b, A_log_ptr, dt_bias_ptr, head, dk, in_k, scale, DK: tl.constexpr
):  # fmt: skip
    """One token of one head: `(S, o, k normalised, error, decay)` from `S [dv, dk]`, `q, k [dk]`,
    `v [dv]` and the projections of the gates, `a [dk]` and `b`."""
    beta = tl.sigmoid(b.to(tl.float32))
    decay = tl.exp(log_decay(a, A_log_ptr, dt_bias_ptr, head, dk, in_k, DK))
    q = q * (_inverse_norm(q) * scale)
    k = k * _inverse_norm(k)
    S = S * decay[None, :]
    error = beta * (v - tl.sum(S * k[None, :], axis=1))
    S = tl.fma(error[:, None], k[None, :], S)
    return S, tl.sum(S * q[None, :], axis=1), k, error, decay


@triton.jit
def _recurrent_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    index_ptr,
    carried_ptr,
    starts_ptr,
    out_ptr,
    scale,
    stride_qkv,
    stride_a,
    stride_b,
    stride_state,
    stride_out,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (dv tiles, heads, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2)
    index = tl.load(index_ptr + seq).to(tl.int64)
    first = tl.load(starts_ptr + seq).to(tl.int64)
    count = (tl.load(starts_ptr + seq + 1) - first).to(tl.int32)
    if index < 0 or count == 0:
        return
    dk = tl.arange(0, BK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = dk < DK, dv < DV
    inside = in_v[:, None] & in_k[None, :]
    stored = state_ptr + index * stride_state + head * DV * DK + dv[:, None] * DK + dk[None, :]
    carried = tl.load(carried_ptr + seq)
    S = tl.load(stored, mask=inside & (carried != 0), other=0.0).to(tl.float32)
    for i in range(count):
        t = first + i
        row = qkv_ptr + t * stride_qkv + head * DK
        q = tl.load(row + dk, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(row + HEADS * DK + dk, mask=in_k, other=0.0).to(tl.float32)
        values = qkv_ptr + t * stride_qkv + 2 * HEADS * DK + head * DV
        v = tl.load(values + dv, mask=in_v, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + t * stride_a + head * DK + dk, mask=in_k, other=0.0)
        b = tl.load(b_ptr + t * stride_b + head)
        S, o, k, error, decay = recurrent_step(
            S, q, k, v, a, b, A_log_ptr, dt_bias_ptr, head, dk, in_k, scale, DK
        )
        tl.store(out_ptr + t * stride_out + head * DV + dv, o, mask=in_v)
    tl.store(stored, S, mask=inside)


def run_recurrent(problem: KdaPrefill) -> None:
    """See `naive.kda_prefill`."""
    heads, _, dk, dv = problem.heads
    seqs, gates = len(problem.state_indices), problem.gates
    if seqs == 0:
        return
    block_v = min(_ROWS, next_power_of_2(dv))
    _recurrent_kernel[(cdiv(dv, block_v), heads, seqs)](
        problem.qkv,
        gates.a,
        gates.b,
        gates.A_log,
        gates.dt_bias,
        problem.state,
        problem.state_indices,
        problem.has_initial_state,
        problem.query_start_loc,
        problem.out,
        dk**-0.5,
        problem.qkv.stride(0),
        gates.a.stride(0),
        gates.b.stride(0),
        problem.state.stride(0),
        problem.out.stride(0),
        HEADS=heads,
        DK=dk,
        DV=dv,
        BK=next_power_of_2(dk),
        BV=block_v,
        num_warps=1,
    )
