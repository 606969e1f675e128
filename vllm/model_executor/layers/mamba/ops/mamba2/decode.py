# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Decodes of Mamba2: the convolution of all channels, then the recurrence of a head per program.

B and C belong to several heads, so their channels are convolved in a launch of their own. With a
`Journal` a program replays the tokens that are not committed, operation by operation as the steps
that brought them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.journal import Journal
from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import step_size
from vllm.model_executor.layers.mamba.ops.mamba2.problem import Mamba2Decode
from vllm.utils.math_utils import cdiv, next_power_of_2

#: channels of a program of the convolution
_CHANNELS = 256


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
def _convolve_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    conv_ptr,
    index_ptr,
    steps_ptr,
    taken_ptr,
    inputs_ptr,
    mixed_ptr,
    stride_x,
    stride_conv,
    CHANNELS: tl.constexpr,
    PAST: tl.constexpr,
    TOKENS: tl.constexpr,
    KEPT: tl.constexpr,
    BIAS: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid (channel tiles, sequences). The state takes in the accepted drafts of the last step and
    the first token; the inputs of the other tokens are kept."""
    seq = tl.program_id(1).to(tl.int64)
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        return
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < CHANNELS
    taken = 0
    kept = inputs_ptr
    if KEPT > 0:
        row = tl.load(steps_ptr + seq * 4).to(tl.int64)
        taken = tl.load(taken_ptr + row)
        kept = inputs_ptr + row * (KEPT * CHANNELS) + c
    x = x_ptr + seq * TOKENS * stride_x + c
    past = conv_ptr + index * stride_conv + c
    for t in tl.static_range(TOKENS):
        y = tl.zeros((BC,), tl.float32)
        for i in tl.static_range(PAST + 1):
            raw = _raw_input(x, past, kept, t + i - PAST, taken, inside, stride_x, CHANNELS, PAST,
                             KEPT)  # fmt: skip
            y += raw * tl.load(w_ptr + c * (PAST + 1) + i, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(mixed_ptr + (seq * TOKENS + t) * CHANNELS + c, y * tl.sigmoid(y), mask=inside)
    for i in tl.static_range(PAST):
        # Ascending: a place is filled from later ones, which have not been written yet. A channel
        # may be in several threads: all have read its values before one writes them.
        value = _raw_input(x, past, kept, i + 1 - PAST, taken, inside, stride_x, CHANNELS, PAST,
                           KEPT)  # fmt: skip
        tl.debug_barrier()
        tl.store(past + i * CHANNELS, value, mask=inside)
    if KEPT > 0:
        tl.debug_barrier()
        for t in tl.static_range(1, TOKENS):
            draft = tl.load(x + t * stride_x, mask=inside, other=0.0)
            tl.store(kept + (t - 1) * CHANNELS, draft, mask=inside)


def convolve_decodes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_indices: Tensor,
    journal: Journal | None,
    width: int,
) -> Tensor:
    """`naive_journal.convolve_tokens`, `[tokens, channels]`; without a journal, one token each."""
    channels, taps = weight.shape
    mixed = x.new_empty(len(x), channels)
    _convolve_kernel[(cdiv(channels, _CHANNELS), len(state_indices))](
        x,
        weight,
        bias,
        conv_state,
        state_indices,
        None if journal is None else journal.steps,
        None if journal is None else journal.taken,
        None if journal is None else journal.inputs,
        mixed,
        x.stride(0),
        conv_state.stride(0),
        CHANNELS=channels,
        PAST=taps - 1,
        TOKENS=width,
        KEPT=0 if journal is None else journal.width - 1,
        BIAS=bias is not None,
        BC=_CHANNELS,
    )
    return mixed


@triton.jit
def _decode_kernel(
    mixed_ptr,
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
    low,
    high,
    stride_dt,
    stride_state,
    stride_out,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    JOURNAL: tl.constexpr,
    PLACES: tl.constexpr,
    ROUND: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """Grid (heads, sequences). A group's first head keeps its B in the journal."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * N
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        return
    group = head // (HEADS // GROUPS)
    p, n = tl.arange(0, BP), tl.arange(0, BN)
    in_p, in_n = p < P, n < N
    inside = in_p[:, None] & in_n[None, :]
    stored = state_ptr + index * stride_state + head * P * N + p[:, None] * N + n[None, :]
    S = tl.load(stored, mask=inside, other=0.0).to(tl.float32)
    commit = 1
    if JOURNAL:
        row = tl.load(steps_ptr + seq * 4).to(tl.int64)
        pending = tl.load(steps_ptr + seq * 4 + 1)
        commit = tl.load(steps_ptr + seq * 4 + 2)
        first = tl.load(steps_ptr + seq * 4 + 3)
        keys = keys_ptr + (row * PLACES * GROUPS + group) * N + n
        errors = errors_ptr + (row * PLACES * HEADS + head) * P + p
        decays = decays_ptr + row * PLACES * HEADS + head
        for i in range(pending):
            at = (first + i) % PLACES
            k = tl.load(keys + at * (GROUPS * N), mask=in_n, other=0.0)
            error = tl.load(errors + at * (HEADS * P), mask=in_p, other=0.0)
            S = tl.fma(error[:, None], k[None, :], S * tl.load(decays + at * HEADS))
            if ROUND:
                S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
    rate = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    own = tl.load(D_ptr + head).to(tl.float32)
    leads = head % (HEADS // GROUPS) == 0
    for t in range(TOKENS):
        token = seq * TOKENS + t
        mixed = mixed_ptr + token * CHANNELS
        x = tl.load(mixed + head * P + p, mask=in_p, other=0.0).to(tl.float32)
        shared = mixed + HEADS * P + group * N + n
        B = tl.load(shared, mask=in_n, other=0.0).to(tl.float32)
        C = tl.load(shared + GROUPS * N, mask=in_n, other=0.0).to(tl.float32)
        dt = step_size(tl.load(dt_ptr + token * stride_dt + head), bias, low, high)
        decay = tl.exp(rate * dt)
        error = dt * x
        S = tl.fma(error[:, None], B[None, :], S * decay)
        y = tl.sum(S * C[None, :], axis=1) + own * x
        tl.store(out_ptr + token * stride_out + head * P + p, y, mask=in_p)
        if (t == 0) & (commit != 0):
            tl.store(stored, S, mask=inside)
        else:
            if JOURNAL:
                at = (first + pending + t - commit) % PLACES
                tl.store(keys + at * (GROUPS * N), B, mask=in_n & leads)
                tl.store(errors + at * (HEADS * P), error, mask=in_p)
                tl.store(decays + at * HEADS, decay)
        if ROUND:
            S = S.to(state_ptr.dtype.element_ty).to(tl.float32)


def mamba2_decode(problem: Mamba2Decode) -> None:
    """See `naive.mamba2_decode`."""
    sizes, gates, journal = problem.sizes, problem.gates, problem.journal
    seqs = len(problem.state_indices)
    if seqs == 0:
        return
    mixed = convolve_decodes(
        problem.x,
        problem.conv_weight,
        problem.conv_bias,
        problem.conv_state,
        problem.state_indices,
        journal,
        problem.width,
    )
    block_p, block_n = next_power_of_2(sizes.head_dim), next_power_of_2(sizes.state_size)
    _decode_kernel[(sizes.num_heads, seqs)](
        mixed,
        gates.dt,
        gates.A_log,
        gates.dt_bias,
        gates.D,
        problem.state,
        problem.state_indices,
        None if journal is None else journal.steps,
        None if journal is None else journal.keys,
        None if journal is None else journal.errors,
        None if journal is None else journal.decays,
        problem.out,
        *gates.dt_limit,
        gates.dt.stride(0),
        problem.state.stride(0),
        problem.out.stride(0),
        HEADS=sizes.num_heads,
        GROUPS=sizes.num_groups,
        P=sizes.head_dim,
        N=sizes.state_size,
        TOKENS=problem.width,
        JOURNAL=journal is not None,
        PLACES=1 if journal is None else journal.places,
        ROUND=problem.state.dtype != torch.float32,
        BP=block_p,
        BN=block_n,
        num_warps=min(16, max(1, block_p * block_n // 1024)),
    )
