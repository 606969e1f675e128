# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Mamba2 on GPUs: prefills in chunks (state-space duality, arXiv 2405.21060, section 6).

With `l` the running sum of log decays in a chunk: `Y = ((C B^T) * exp(l_i - l_j))(dt X) +
exp(l) C h^T`, then `h <- exp(l_Q) h + ((exp(l_Q - l) dt) X)^T B`. A program walks one sequence's
chunks with some rows of one head's state in fp32 registers, so a prefill is one launch.
"""

import triton
import triton.language as tl

from vllm.model_executor.layers.fla.ops.gated_delta_rule.commit import run_commit
from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import step_size
from vllm.model_executor.layers.mamba.ops.mamba2.decode import mamba2_decode
from vllm.model_executor.layers.mamba.ops.mamba2.problem import Mamba2Prefill
from vllm.utils.math_utils import cdiv, next_power_of_2

__all__ = ["mamba2_commit", "mamba2_decode", "mamba2_prefill"]

mamba2_commit = run_commit

#: tokens of a chunk, and rows (P) of a program's tile of the state
_TOKENS, _ROWS = 64, 64


@triton.jit
def _chunk_scan_kernel(
    xbc_ptr,
    dt_ptr,
    A_log_ptr,
    dt_bias_ptr,
    D_ptr,
    state_ptr,
    index_ptr,
    carried_ptr,
    starts_ptr,
    out_ptr,
    low,
    high,
    stride_xbc,
    stride_dt,
    stride_state,
    stride_out,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """Grid (tiles of P, heads, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2)
    index = tl.load(index_ptr + seq).to(tl.int64)
    first = tl.load(starts_ptr + seq).to(tl.int64)
    length = (tl.load(starts_ptr + seq + 1) - first).to(tl.int32)
    if (index < 0) | (length == 0):
        return
    t, n = tl.arange(0, BT), tl.arange(0, BN)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    in_p, in_n = p < P, n < N
    inside = in_p[:, None] & in_n[None, :]
    stored = state_ptr + index * stride_state + head * P * N + p[:, None] * N + n[None, :]
    carried = tl.load(carried_ptr + seq)
    S = tl.load(stored, mask=inside & (carried != 0), other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    own = tl.load(D_ptr + head).to(tl.float32)
    dtype: tl.constexpr = xbc_ptr.dtype.element_ty
    shared = HEADS * P + (head // (HEADS // GROUPS)) * N
    earlier = t[:, None] >= t[None, :]
    for done in range(0, length, BT):
        valid = done + t < length
        token = first + done + t
        row = xbc_ptr + token[:, None] * stride_xbc
        x = tl.load(row + head * P + p[None, :], mask=valid[:, None] & in_p[None, :], other=0.0)
        in_bc = valid[:, None] & in_n[None, :]
        B = tl.load(row + shared + n[None, :], mask=in_bc, other=0.0)
        C = tl.load(row + shared + GROUPS * N + n[None, :], mask=in_bc, other=0.0)
        dt = tl.load(dt_ptr + token * stride_dt + head, mask=valid, other=0.0)
        dt = tl.where(valid, step_size(dt, bias, low, high), 0.0)
        log_decay = tl.cumsum(rate * dt)
        total = tl.sum(rate * dt)
        between = tl.where(earlier, log_decay[:, None] - log_decay[None, :], -float("inf"))
        scores = tl.dot(C, tl.trans(B), input_precision="ieee") * tl.exp(between) * dt[None, :]
        y = tl.dot(scores.to(dtype), x, input_precision="ieee")
        seen = tl.dot(C, tl.trans(S.to(dtype)), input_precision="ieee")
        y += seen * tl.exp(log_decay)[:, None] + own * x.to(tl.float32)
        to_end = x.to(tl.float32) * (tl.exp(total - log_decay) * dt)[:, None]
        S = tl.dot(tl.trans(to_end.to(dtype)), B, S * tl.exp(total), input_precision="ieee")
        places = out_ptr + token[:, None] * stride_out + head * P + p[None, :]
        tl.store(places, y, mask=valid[:, None] & in_p[None, :])
    tl.store(stored, S, mask=inside)


def mamba2_prefill(problem: Mamba2Prefill) -> None:
    """See `naive.mamba2_prefill`."""
    sizes, gates, seqs = problem.sizes, problem.gates, len(problem.state_indices)
    if seqs == 0:
        return
    block_p = min(_ROWS, max(16, next_power_of_2(sizes.head_dim)))
    _chunk_scan_kernel[(cdiv(sizes.head_dim, block_p), sizes.num_heads, seqs)](
        problem.x,
        gates.dt,
        gates.A_log,
        gates.dt_bias,
        gates.D,
        problem.state,
        problem.state_indices,
        problem.has_initial_state,
        problem.query_start_loc,
        problem.out,
        *gates.dt_limit,
        problem.x.stride(0),
        gates.dt.stride(0),
        problem.state.stride(0),
        problem.out.stride(0),
        HEADS=sizes.num_heads,
        GROUPS=sizes.num_groups,
        P=sizes.head_dim,
        N=sizes.state_size,
        BT=_TOKENS,
        BP=block_p,
        BN=max(16, next_power_of_2(sizes.state_size)),
        num_warps=4,
        num_stages=1,
    )
