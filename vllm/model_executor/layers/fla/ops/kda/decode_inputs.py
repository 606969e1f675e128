# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What a decode step of Kimi delta attention multiplies its states with: convolution, l2 norms and
gates of its tokens."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import softplus
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode
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
def _tap(w_ptr, packed, c, inside, i, TAPS: tl.constexpr, PACKED: tl.constexpr):
    """Weight `i` of channels `c` as fp32; `packed`: all four of a channel in 64 bits."""
    if PACKED:
        bits = (packed >> (16 * i)).to(tl.int16)
        return bits.to(w_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        return tl.load(w_ptr + c * TAPS + i, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _inputs_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    w_ptr,
    conv_ptr,
    index_ptr,
    steps_ptr,
    taken_ptr,
    keys_ptr,
    decays_ptr,
    inputs_ptr,
    vectors_ptr,
    betas_ptr,
    scale,
    stride_qkv,
    stride_a,
    stride_b,
    stride_conv,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAST: tl.constexpr,
    TOKENS: tl.constexpr,
    JOURNAL: tl.constexpr,
    PLACES: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
    PACKED: tl.constexpr,
    BM: tl.constexpr,
):
    """Grid (heads, sequences); a program holds q, k and v as `[4, BM]`.

    With PDL the next kernel may start at once: until it waits it reads what this one does not
    write. Every program waits, padding too, so that a kernel's end means the end of all before it.
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CHANNELS: tl.constexpr = HEADS * (2 * DK + DV)
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        return
    part, m = tl.arange(0, 4), tl.arange(0, BM)
    first = tl.where(part < 2, (part * HEADS + head) * DK, 2 * HEADS * DK + head * DV)
    size = tl.where(part < 2, DK, tl.where(part == 2, DV, 0))
    c = first[:, None] + m[None, :]
    inside = m[None, :] < size[:, None]
    in_k = m < DK
    commit, taken = 1, 0
    if JOURNAL:
        row = tl.load(steps_ptr + seq * 4).to(tl.int64)
        pending = tl.load(steps_ptr + seq * 4 + 1)
        commit = tl.load(steps_ptr + seq * 4 + 2)
        place = tl.load(steps_ptr + seq * 4 + 3)
    kept = inputs_ptr
    if KEPT > 0:
        taken = tl.load(taken_ptr + row)
        kept = inputs_ptr + row * (KEPT * CHANNELS) + c
    x = qkv_ptr + seq * TOKENS * stride_qkv + c
    past = conv_ptr + index * stride_conv + c
    rate = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head * DK + m, mask=in_k, other=0.0).to(tl.float32)
    packed = c
    if PACKED:
        packed = tl.load(w_ptr.to(tl.pointer_type(tl.int64)) + c, mask=inside, other=0)
    SINGLE: tl.constexpr = TOKENS == 1 and KEPT == 0
    for t in range(TOKENS):
        y = tl.zeros((4, BM), tl.float32)
        for i in tl.static_range(PAST + 1):
            if not SINGLE:
                raw = _raw_input(x, past, kept, t + i - PAST, taken, inside, stride_qkv, CHANNELS,
                                 PAST, KEPT)  # fmt: skip
            elif i < PAST:
                raw = tl.load(past + i * CHANNELS, mask=inside, other=0.0).to(tl.float32)
            else:
                raw = tl.load(x, mask=inside, other=0.0).to(tl.float32)
            y += raw * _tap(w_ptr, packed, c, inside, i, PAST + 1, PACKED)
        y = (y * tl.sigmoid(y)).to(x.dtype.element_ty).to(tl.float32)
        norms = tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)
        norms = tl.where(part == 0, norms * scale, tl.where(part == 1, norms, 1.0))
        y = y * norms[:, None]
        token = seq * TOKENS + t
        a = tl.load(a_ptr + token * stride_a + head * DK + m, mask=in_k, other=0.0)
        decay = tl.exp(rate * softplus(a.to(tl.float32) + dt_bias))
        beta = tl.sigmoid(tl.load(b_ptr + token * stride_b + head).to(tl.float32))
        vectors = vectors_ptr + (token * HEADS + head) * (4 * BM)
        tl.store(vectors + part[:, None] * BM + m[None, :], y, mask=(part < 3)[:, None])
        tl.store(vectors + 3 * BM + m, decay)
        tl.store(betas_ptr + token * HEADS + head, beta)
        if JOURNAL:
            if (t > 0) | (commit == 0):
                at = row * PLACES + (place + pending + t - commit) % PLACES
                of_key = keys_ptr + (at * HEADS + head) * DK + m[None, :] + (part * 0)[:, None]
                tl.store(of_key, y, mask=inside & (part == 1)[:, None])
                tl.store(decays_ptr + (at * HEADS + head) * DK + m, decay, mask=in_k)
    # The state takes in the accepted drafts of the last step and the first token; the inputs of the
    # others are kept. A channel may be in several threads: all read it before one writes it.
    tl.debug_barrier()
    for i in tl.static_range(PAST):
        if not SINGLE:
            value = _raw_input(x, past, kept, i + 1 - PAST, taken, inside, stride_qkv, CHANNELS,
                               PAST, KEPT)  # fmt: skip
        elif i + 1 < PAST:
            value = tl.load(past + (i + 1) * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        else:
            value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
        tl.debug_barrier()
        tl.store(past + i * CHANNELS, value, mask=inside)
    if KEPT > 0:
        tl.debug_barrier()
        for t in tl.static_range(1, TOKENS):
            draft = tl.load(x + t * stride_qkv, mask=inside, other=0.0)
            tl.store(kept + (t - 1) * CHANNELS, draft, mask=inside)


@dataclass(frozen=True)
class DecodeInputs:
    """Of each token, fp32: `vectors [tokens, heads, 4, width]` (q scaled, k, v and decay) and
    `betas [tokens, heads]`."""

    vectors: Tensor
    betas: Tensor


def decode_inputs(p: KdaDecode, overlaps: bool) -> DecodeInputs:
    """Update the convolution's state, fill the journal's keys and decays, and give the rest.

    With `overlaps` the next kernel may start before this one ends.
    """
    heads, _, dk, dv = p.heads
    tokens, seqs, gates, journal = len(p.qkv), len(p.state_indices), p.gates, p.journal
    width = next_power_of_2(max(dk, dv))
    inputs = DecodeInputs(
        torch.empty(tokens, heads, 4, width, dtype=torch.float32, device=p.qkv.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=p.qkv.device),
    )
    _inputs_kernel[(heads, seqs)](
        p.qkv,
        gates.a,
        gates.b,
        gates.A_log,
        gates.dt_bias,
        p.conv_weight,
        p.conv_state,
        p.state_indices,
        None if journal is None else journal.steps,
        None if journal is None else journal.taken,
        None if journal is None else journal.keys,
        None if journal is None else journal.decays,
        None if journal is None else journal.inputs,
        inputs.vectors,
        inputs.betas,
        dk**-0.5,
        p.qkv.stride(0),
        gates.a.stride(0),
        gates.b.stride(0),
        p.conv_state.stride(0),
        HEADS=heads,
        DK=dk,
        DV=dv,
        PAST=p.conv_weight.shape[1] - 1,
        TOKENS=p.width,
        JOURNAL=journal is not None,
        PLACES=1 if journal is None else journal.places,
        KEPT=0 if journal is None else journal.width - 1,
        PDL=overlaps,
        PACKED=p.conv_weight.shape[1] == 4 and p.conv_weight.element_size() == 2,
        BM=width,
        num_warps=4,
        launch_pdl=overlaps,
    )
    return inputs
