# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Decodes of grouped Mamba: the convolution of all channels, then the recurrence of a head per
program. With a `Journal` a program first replays the tokens that are not committed, operation by
operation as the steps that brought them.
"""

import torch
import triton
import triton.language as tl

from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import softplus
from vllm.model_executor.layers.mamba.ops.mamba1.problem import Mamba1Decode, repeat_groups
from vllm.model_executor.layers.mamba.ops.mamba2.decode import convolve_decodes
from vllm.utils.math_utils import next_power_of_2


@triton.jit
def _decode_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    dt_ptr,
    A_log_ptr,
    dt_bias_ptr,
    D_ptr,
    state_ptr,
    index_ptr,
    steps_ptr,
    keys_ptr,
    errors_ptr,
    decays_ptr,
    out_ptr,
    stride_x,
    stride_B,
    stride_C,
    stride_dt,
    stride_state,
    stride_out,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    JOURNAL: tl.constexpr,
    PLACES: tl.constexpr,
    ROUND: tl.constexpr,
    BN: tl.constexpr,
):
    """Grid (heads, sequences). A group's first head keeps its B in the journal."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        return
    group = head // (HEADS // GROUPS)
    p, n = tl.arange(0, BN), tl.arange(0, BN)
    in_p, in_n = p < N, n < N
    inside = in_p[:, None] & in_n[None, :]
    c = head * N + p
    place = c[:, None] * N + n[None, :]
    stored = state_ptr + index * stride_state + place
    S = tl.load(stored, mask=inside, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log_ptr + place, mask=inside, other=0.0).to(tl.float32))
    commit = 1
    if JOURNAL:
        row = tl.load(steps_ptr + seq * 4).to(tl.int64)
        pending = tl.load(steps_ptr + seq * 4 + 1)
        commit = tl.load(steps_ptr + seq * 4 + 2)
        first = tl.load(steps_ptr + seq * 4 + 3)
        keys = keys_ptr + (row * PLACES * GROUPS + group) * N + n
        errors = errors_ptr + (row * PLACES * HEADS + head) * N + p
        decays = decays_ptr + (row * PLACES * HEADS + head) * N + p
        for i in range(pending):
            at = (first + i) % PLACES
            B = tl.load(keys + at * (GROUPS * N), mask=in_n, other=0.0)
            error = tl.load(errors + at * (HEADS * N), mask=in_p, other=0.0)
            dt = tl.load(decays + at * (HEADS * N), mask=in_p, other=0.0)
            S = tl.fma(error[:, None], B[None, :], S * tl.exp(rate * dt[:, None]))
            if ROUND:
                S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
    bias = tl.load(dt_bias_ptr + c, mask=in_p, other=0.0).to(tl.float32)
    own = tl.load(D_ptr + c, mask=in_p, other=0.0).to(tl.float32)
    leads = head % (HEADS // GROUPS) == 0
    for i in range(TOKENS):
        t = seq * TOKENS + i
        x = tl.load(x_ptr + t * stride_x + c, mask=in_p, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + t * stride_dt + c, mask=in_p, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + t * stride_B + group * N + n, mask=in_n, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + t * stride_C + head * N + n, mask=in_n, other=0.0).to(tl.float32)
        dt = softplus(dt + bias)
        error = dt * x
        S = tl.fma(error[:, None], B[None, :], S * tl.exp(rate * dt[:, None]))
        y = tl.sum(S * C[None, :], axis=1) + own * x
        tl.store(out_ptr + t * stride_out + c, y, mask=in_p)
        if (i == 0) & (commit != 0):
            tl.store(stored, S, mask=inside)
        else:
            if JOURNAL:
                at = (first + pending + i - commit) % PLACES
                tl.store(keys + at * (GROUPS * N), B, mask=in_n & leads)
                tl.store(errors + at * (HEADS * N), error, mask=in_p)
                tl.store(decays + at * (HEADS * N), dt, mask=in_p)
        if ROUND:
            S = S.to(state_ptr.dtype.element_ty).to(tl.float32)


def mamba1_decode(problem: Mamba1Decode) -> None:
    """See `naive.mamba1_decode`."""
    gates, state, journal = problem.gates, problem.state, problem.journal
    indices = problem.state_indices
    if len(indices) == 0:
        return
    conv = (problem.conv_weight, problem.conv_bias, problem.conv_state, indices)
    mixed = convolve_decodes(problem.x, *conv, journal, problem.width)
    mixed = repeat_groups(mixed, problem.out.shape[1], state.shape[2])
    heads, size = state.shape[1:3]
    _decode_kernel[(heads, len(indices))](
        mixed,
        gates.B,
        gates.C,
        gates.dt,
        gates.A_log,
        gates.dt_bias,
        gates.D,
        state,
        indices,
        None if journal is None else journal.steps,
        None if journal is None else journal.keys,
        None if journal is None else journal.errors,
        None if journal is None else journal.decays,
        problem.out,
        mixed.stride(0),
        gates.B.stride(0),
        gates.C.stride(0),
        gates.dt.stride(0),
        state.stride(0),
        problem.out.stride(0),
        HEADS=heads,
        GROUPS=heads // gates.heads_per_group,
        N=size,
        TOKENS=problem.width,
        JOURNAL=journal is not None,
        PLACES=1 if journal is None else journal.places,
        ROUND=state.dtype != torch.float32,
        BN=next_power_of_2(size),
        num_warps=1,
    )
