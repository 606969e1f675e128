# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Grouped Mamba on GPUs, token by token: a program keeps the state of one head."""

import triton
import triton.language as tl

from vllm.model_executor.layers.fla.ops.gated_delta_rule.commit import run_commit
from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import softplus
from vllm.model_executor.layers.mamba.ops.mamba1.decode import mamba1_decode
from vllm.model_executor.layers.mamba.ops.mamba1.problem import Mamba1Prefill
from vllm.utils.math_utils import next_power_of_2

__all__ = ["mamba1_commit", "mamba1_decode", "mamba1_prefill"]

mamba1_commit = run_commit


@triton.jit
def _scan_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    dt_ptr,
    A_log_ptr,
    dt_bias_ptr,
    D_ptr,
    state_ptr,
    index_ptr,
    carried_ptr,
    starts_ptr,
    out_ptr,
    stride_x,
    stride_B,
    stride_C,
    stride_dt,
    stride_state,
    stride_out,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    BN: tl.constexpr,
):
    """Grid (heads, sequences)."""
    head, seq = tl.program_id(0), tl.program_id(1)
    index = tl.load(index_ptr + seq).to(tl.int64)
    carried = tl.load(carried_ptr + seq) != 0
    first = tl.load(starts_ptr + seq).to(tl.int64)
    count = (tl.load(starts_ptr + seq + 1) - first).to(tl.int32)
    if (index < 0) | (count == 0):
        return
    p, n = tl.arange(0, BN), tl.arange(0, BN)
    in_p, in_n = p < N, n < N
    inside = in_p[:, None] & in_n[None, :]
    c = head * N + p
    place = c[:, None] * N + n[None, :]
    stored = state_ptr + index * stride_state + place
    S = tl.load(stored, mask=inside & carried, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log_ptr + place, mask=inside, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + c, mask=in_p, other=0.0).to(tl.float32)
    own = tl.load(D_ptr + c, mask=in_p, other=0.0).to(tl.float32)
    for i in range(count):
        t = first + i
        x = tl.load(x_ptr + t * stride_x + c, mask=in_p, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + t * stride_dt + c, mask=in_p, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + t * stride_B + (head // GROUP) * N + n, mask=in_n, other=0.0)
        C = tl.load(C_ptr + t * stride_C + head * N + n, mask=in_n, other=0.0)
        dt = softplus(dt + bias)
        S = tl.fma((dt * x)[:, None], B.to(tl.float32)[None, :], S * tl.exp(rate * dt[:, None]))
        y = tl.sum(S * C.to(tl.float32)[None, :], axis=1) + own * x
        tl.store(out_ptr + t * stride_out + c, y, mask=in_p)
    tl.store(stored, S, mask=inside)


def mamba1_prefill(problem: Mamba1Prefill) -> None:
    """See `naive.mamba1_prefill`."""
    gates, state, seqs = problem.gates, problem.state, len(problem.state_indices)
    if seqs == 0:
        return
    heads, size = state.shape[1:3]
    _scan_kernel[(heads, seqs)](
        problem.x,
        gates.B,
        gates.C,
        gates.dt,
        gates.A_log,
        gates.dt_bias,
        gates.D,
        state,
        problem.state_indices,
        problem.has_initial_state,
        problem.query_start_loc,
        problem.out,
        problem.x.stride(0),
        gates.B.stride(0),
        gates.C.stride(0),
        gates.dt.stride(0),
        state.stride(0),
        problem.out.stride(0),
        GROUP=gates.heads_per_group,
        N=size,
        BN=next_power_of_2(size),
        num_warps=1,
    )
