# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Decodes of Kimi delta attention: convolution, gates and recurrence of a head in one program.

A head has q, k and v channels of its own, so nothing is computed twice. With a `Journal` a program
replays the tokens that are not committed, operation by operation as the steps that brought them.
"""

import torch
import triton
import triton.language as tl

from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode
from vllm.model_executor.layers.fla.ops.kda.recurrent import recurrent_step
from vllm.utils.math_utils import next_power_of_2


@triton.jit
def _raw_input(x, past, kept, token, taken, inside, stride_x, CHANNELS: tl.constexpr,
               PAST: tl.constexpr, KEPT: tl.constexpr):  # fmt: skip
    """The raw input of `token` of this step; before its first come the accepted drafts of the last
    step, and before these the convolution's state."""
    value = tl.load(x + token * stride_x, mask=inside & (token >= 0), other=0.0).to(tl.float32)
    before = PAST + taken + token
    in_past = (token < 0) & (before < PAST)
    value += tl.load(past + before * CHANNELS, mask=inside & in_past, other=0.0).to(tl.float32)
    if KEPT > 0:
        in_kept = (token < 0) & (before >= PAST)
        draft = kept + (before - PAST) * CHANNELS
        value += tl.load(draft, mask=inside & in_kept, other=0.0).to(tl.float32)
    return value


@triton.jit
def _convolved(x, past, kept, w_ptr, c, token, taken, inside, stride_x, CHANNELS: tl.constexpr,
               PAST: tl.constexpr, KEPT: tl.constexpr):  # fmt: skip
    """SiLU of the convolution of channels `c` at `token`, rounded to the activations' dtype."""
    y = tl.zeros(c.shape, tl.float32)
    for i in tl.static_range(PAST + 1):
        raw = _raw_input(x + c, past + c, kept + c if KEPT > 0 else None, token + i - PAST, taken,
                         inside, stride_x, CHANNELS, PAST, KEPT)  # fmt: skip
        y += raw * tl.load(w_ptr + c * (PAST + 1) + i, mask=inside, other=0.0).to(tl.float32)
    return (y * tl.sigmoid(y)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _keep_inputs(x, past, kept, c, taken, inside, stride_x, CHANNELS: tl.constexpr,
                 PAST: tl.constexpr, KEPT: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """The state takes in the accepted drafts of the last step and the first token; the inputs of
    the other tokens are kept. A channel may be in several threads: all have read its values before
    one writes them."""
    for i in tl.static_range(PAST):
        value = _raw_input(x + c, past + c, kept + c if KEPT > 0 else None, i + 1 - PAST, taken,
                           inside, stride_x, CHANNELS, PAST, KEPT)  # fmt: skip
        tl.debug_barrier()
        tl.store(past + i * CHANNELS + c, value, mask=inside)
    if KEPT > 0:
        tl.debug_barrier()
        for t in tl.static_range(1, TOKENS):
            draft = tl.load(x + t * stride_x + c, mask=inside, other=0.0)
            tl.store(kept + (t - 1) * CHANNELS + c, draft, mask=inside)


@triton.jit
def _decode_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    w_ptr,
    conv_ptr,
    state_ptr,
    index_ptr,
    steps_ptr,
    taken_ptr,
    keys_ptr,
    errors_ptr,
    decays_ptr,
    inputs_ptr,
    out_ptr,
    scale,
    stride_qkv,
    stride_a,
    stride_b,
    stride_conv,
    stride_state,
    stride_out,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAST: tl.constexpr,
    TOKENS: tl.constexpr,
    JOURNAL: tl.constexpr,
    PLACES: tl.constexpr,
    KEPT: tl.constexpr,
    ROUND: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (heads, sequences)."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CHANNELS: tl.constexpr = HEADS * (2 * DK + DV)
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        return
    dk, dv = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = dk < DK, dv < DV
    inside = in_v[:, None] & in_k[None, :]
    stored = state_ptr + index * stride_state + head * DV * DK + dv[:, None] * DK + dk[None, :]
    S = tl.load(stored, mask=inside, other=0.0).to(tl.float32)
    commit, taken = 1, 0
    if JOURNAL:
        row = tl.load(steps_ptr + seq * 4).to(tl.int64)
        pending = tl.load(steps_ptr + seq * 4 + 1)
        commit = tl.load(steps_ptr + seq * 4 + 2)
        first = tl.load(steps_ptr + seq * 4 + 3)
        keys = keys_ptr + (row * PLACES * HEADS + head) * DK + dk
        decays = decays_ptr + (row * PLACES * HEADS + head) * DK + dk
        errors = errors_ptr + (row * PLACES * HEADS + head) * DV + dv
        for i in range(pending):
            at = (first + i) % PLACES
            k = tl.load(keys + at * (HEADS * DK), mask=in_k, other=0.0)
            decay = tl.load(decays + at * (HEADS * DK), mask=in_k, other=0.0)
            error = tl.load(errors + at * (HEADS * DV), mask=in_v, other=0.0)
            S = tl.fma(error[:, None], k[None, :], S * decay[None, :])
            if ROUND:
                S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
    kept = inputs_ptr
    if KEPT > 0:
        taken = tl.load(taken_ptr + row)
        kept = inputs_ptr + row * (KEPT * CHANNELS)
    x = qkv_ptr + seq * TOKENS * stride_qkv
    past = conv_ptr + index * stride_conv
    qc, kc = head * DK + dk, (HEADS + head) * DK + dk
    vc = 2 * HEADS * DK + head * DV + dv
    for t in range(TOKENS):
        token = seq * TOKENS + t
        q = _convolved(x, past, kept, w_ptr, qc, t, taken, in_k, stride_qkv, CHANNELS, PAST, KEPT)
        k = _convolved(x, past, kept, w_ptr, kc, t, taken, in_k, stride_qkv, CHANNELS, PAST, KEPT)
        v = _convolved(x, past, kept, w_ptr, vc, t, taken, in_v, stride_qkv, CHANNELS, PAST, KEPT)
        a = tl.load(a_ptr + token * stride_a + head * DK + dk, mask=in_k, other=0.0)
        b = tl.load(b_ptr + token * stride_b + head)
        S, o, k, error, decay = recurrent_step(
            S, q, k, v, a, b, A_log_ptr, dt_bias_ptr, head, dk, in_k, scale, DK
        )
        tl.store(out_ptr + token * stride_out + head * DV + dv, o, mask=in_v)
        if (t == 0) & (commit != 0):
            tl.store(stored, S, mask=inside)
        else:
            if JOURNAL:
                at = (first + pending + t - commit) % PLACES
                tl.store(keys + at * (HEADS * DK), k, mask=in_k)
                tl.store(decays + at * (HEADS * DK), decay, mask=in_k)
                tl.store(errors + at * (HEADS * DV), error, mask=in_v)
        if ROUND:
            S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
    tl.debug_barrier()
    _keep_inputs(x, past, kept, qc, taken, in_k, stride_qkv, CHANNELS, PAST, KEPT, TOKENS)
    _keep_inputs(x, past, kept, kc, taken, in_k, stride_qkv, CHANNELS, PAST, KEPT, TOKENS)
    _keep_inputs(x, past, kept, vc, taken, in_v, stride_qkv, CHANNELS, PAST, KEPT, TOKENS)


def run_decode(problem: KdaDecode) -> None:
    """See `naive.kda_decode`."""
    heads, _, dk, dv = problem.heads
    seqs, gates, journal = len(problem.state_indices), problem.gates, problem.journal
    if seqs == 0:
        return
    block_k, block_v = next_power_of_2(dk), next_power_of_2(dv)
    _decode_kernel[(heads, seqs)](
        problem.qkv,
        gates.a,
        gates.b,
        gates.A_log,
        gates.dt_bias,
        problem.conv_weight,
        problem.conv_state,
        problem.state,
        problem.state_indices,
        None if journal is None else journal.steps,
        None if journal is None else journal.taken,
        None if journal is None else journal.keys,
        None if journal is None else journal.errors,
        None if journal is None else journal.decays,
        None if journal is None else journal.inputs,
        problem.out,
        dk**-0.5,
        problem.qkv.stride(0),
        gates.a.stride(0),
        gates.b.stride(0),
        problem.conv_state.stride(0),
        problem.state.stride(0),
        problem.out.stride(0),
        HEADS=heads,
        DK=dk,
        DV=dv,
        PAST=problem.conv_weight.shape[1] - 1,
        TOKENS=problem.width,
        JOURNAL=journal is not None,
        PLACES=1 if journal is None else journal.places,
        KEPT=0 if journal is None else journal.width - 1,
        ROUND=problem.state.dtype != torch.float32,
        BK=block_k,
        BV=block_v,
        num_warps=min(16, max(1, block_k * block_v // 1024)),
    )
