# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What a decode step multiplies its states with: convolution, l2 norms and gates of its tokens."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import gate
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode
from vllm.utils.math_utils import next_power_of_2

_MAX_WIDTH = 4


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one ahead of it ends (Hopper and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _tap(w_ptr, packed, c, valid, j, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """Weight `j` of channels `c` as fp32; `packed`: all four of a channel in 64 bits."""
    if PACKED:
        bits = (packed >> (16 * j)).to(tl.int16)
        return bits.to(w_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        return tl.load(w_ptr + c * WIDTH + j, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _decode_inputs_kernel(
    x_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    w_ptr,
    bias_ptr,
    conv_ptr,
    index_ptr,
    steps_ptr,
    taken_ptr,
    keys_ptr,
    decays_ptr,
    inputs_ptr,
    vectors_ptr,
    scalars_ptr,
    scale,
    stride_x,
    stride_a,
    stride_b,
    stride_conv,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PLACES: tl.constexpr,
    KEPT: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    JOURNAL: tl.constexpr,
    PDL: tl.constexpr,
    PACKED: tl.constexpr,
    BETA: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BG: tl.constexpr,
):
    """Grid (key heads, sequences); a program holds q, k and the group's v as `[PARTS, BM]`.

    With PDL it starts while the projection still runs, and lets the next kernel start at once: both
    read what no running kernel writes until they have waited. Every program waits, padding too, so
    that a kernel's end means the end of all before it.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    kh, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    KEYS: tl.constexpr = K_HEADS * DK
    CHANNELS: tl.constexpr = 2 * KEYS + V_HEADS * DV
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        if PDL:
            cuda.gdc_wait()
        return
    if JOURNAL:
        row = tl.load(steps_ptr + seq * 4).to(tl.int64)
        pending = tl.load(steps_ptr + seq * 4 + 1)
        commit = tl.load(steps_ptr + seq * 4 + 2)
        first = tl.load(steps_ptr + seq * 4 + 3)
    part, m = tl.arange(0, PARTS), tl.arange(0, BM)[None, :]
    values = 2 * KEYS + (kh * GROUP + part - 2) * DV
    c = tl.where(part < 2, part * KEYS + kh * DK, values)[:, None] + m
    size = tl.where(part < 2, DK, tl.where(part < 2 + GROUP, DV, 0))
    valid = m < size[:, None]
    packed = c
    if PACKED:
        packed = tl.load(w_ptr.to(tl.pointer_type(tl.int64)) + c, mask=valid, other=0)
    block = conv_ptr + index * stride_conv + c
    newest = tl.load(block + (WIDTH - 2) * CHANNELS, mask=valid, other=0.0)
    oldest = newest
    middle = newest
    if WIDTH > 3:
        oldest = tl.load(block, mask=valid, other=0.0)
    if WIDTH > 2:
        middle = tl.load(block + (WIDTH - 3) * CHANNELS, mask=valid, other=0.0)
    if JOURNAL:
        kept = inputs_ptr + row * (KEPT * CHANNELS) + c
        if KEPT > 0:
            # The accepted drafts of the last step.
            for i in range(tl.load(taken_ptr + row)):
                oldest = middle
                middle = newest
                newest = tl.load(kept + i * CHANNELS, mask=valid, other=0.0)
    g = tl.arange(0, BG)
    head = kh * GROUP + g
    for t in tl.static_range(TOKENS):
        y = tl.zeros((PARTS, BM), tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + c, mask=valid, other=0.0).to(tl.float32)
        if WIDTH > 3:
            y += oldest.to(tl.float32) * _tap(w_ptr, packed, c, valid, 0, WIDTH, PACKED)
        if WIDTH > 2:
            y += middle.to(tl.float32) * _tap(w_ptr, packed, c, valid, WIDTH - 3, WIDTH, PACKED)
        y += newest.to(tl.float32) * _tap(w_ptr, packed, c, valid, WIDTH - 2, WIDTH, PACKED)
        if PDL:
            if t == 0:
                cuda.gdc_wait()
        token = seq * TOKENS + t
        x = tl.load(x_ptr + token * stride_x + c, mask=valid, other=0.0)
        a = tl.load(a_ptr + token * stride_a + head, mask=g < GROUP, other=0.0)
        b = tl.load(b_ptr + token * stride_b + head, mask=g < GROUP, other=0.0)
        known = tl.where(g < GROUP, head, 0)
        log_decay, beta = gate(a, b, A_log_ptr, dt_bias_ptr, known, True, BETA)
        decay = tl.exp(log_decay)
        y += x.to(tl.float32) * _tap(w_ptr, packed, c, valid, WIDTH - 1, WIDTH, PACKED)
        y = (y * tl.sigmoid(y)).to(x.dtype).to(tl.float32)
        norms = tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)
        norms = tl.where(part == 0, norms * scale, tl.where(part == 1, norms, 1.0))
        y = y * norms[:, None]
        vectors = vectors_ptr + (token * K_HEADS + kh) * (2 + GROUP) * BM
        tl.store(vectors + part[:, None] * BM + m, y, mask=(part < 2 + GROUP)[:, None])
        scalars = scalars_ptr + (token * V_HEADS + head) * 2
        tl.store(scalars, decay, mask=g < GROUP)
        tl.store(scalars + 1, beta, mask=g < GROUP)
        if JOURNAL:
            if (t > 0) | (commit == 0):
                place = row * PLACES + (first + pending + t - commit) % PLACES
                keys = keys_ptr + place * KEYS + kh * DK + (part * 0)[:, None] + m
                tl.store(keys, y, mask=valid & (part == 1)[:, None])
                tl.store(decays_ptr + place * V_HEADS + head, decay, mask=g < GROUP)
        if t == 0:
            # A channel may be in several threads: all have read its rows before one writes them.
            tl.debug_barrier()
            tl.store(block + (WIDTH - 2) * CHANNELS, x, mask=valid)
            if WIDTH > 2:
                tl.store(block + (WIDTH - 3) * CHANNELS, newest, mask=valid)
            if WIDTH > 3:
                tl.store(block, middle, mask=valid)
        else:
            tl.store(kept + (t - 1) * CHANNELS, x, mask=valid)
        oldest = middle
        middle = newest
        newest = x


@dataclass(frozen=True)
class DecodeInputs:
    """Of each token, fp32: `vectors [tokens, k heads, 2 + group, width]` (q scaled, k, and v of the
    group's value heads) and `scalars [tokens, v heads, 2]` (decay, beta)."""

    vectors: Tensor
    scalars: Tensor


def decode_inputs(p: GdnDecode, overlaps: bool) -> DecodeInputs:
    """Update the convolution's state, fill the journal's keys and decays, and give the rest.

    With `overlaps` this kernel may start before the one that fills `p.qkv` ends, and the next one
    before this one ends.

    Raises:
        ValueError: a convolution of more than 4 taps.
    """
    qkv, conv_weight, journal = p.qkv, p.conv_weight, p.journal
    if conv_weight.shape[1] > _MAX_WIDTH:
        raise ValueError(
            f"convolution width {conv_weight.shape[1]} is not supported; 2 to {_MAX_WIDTH} are"
        )
    num_k_heads, num_v_heads, dk, dv = p.heads
    n, seqs, group = len(qkv), len(p.state_indices), num_v_heads // num_k_heads
    width = next_power_of_2(max(dk, dv))
    inputs = DecodeInputs(
        torch.empty(n, num_k_heads, 2 + group, width, dtype=torch.float32, device=qkv.device),
        torch.empty(n, num_v_heads, 2, dtype=torch.float32, device=qkv.device),
    )
    parts = next_power_of_2(2 + group)
    _decode_inputs_kernel[(num_k_heads, seqs)](
        qkv,
        p.a,
        p.b,
        p.A_log,
        p.dt_bias,
        conv_weight,
        p.conv_bias,
        p.conv_state,
        p.state_indices,
        None if journal is None else journal.steps,
        None if journal is None else journal.taken,
        None if journal is None else journal.keys,
        None if journal is None else journal.decays,
        None if journal is None else journal.inputs,
        inputs.vectors,
        inputs.scalars,
        dk**-0.5,
        qkv.stride(0),
        p.a.stride(0),
        p.b.stride(0),
        p.conv_state.stride(0),
        K_HEADS=num_k_heads,
        V_HEADS=num_v_heads,
        DK=dk,
        DV=dv,
        PLACES=1 if journal is None else journal.places,
        KEPT=0 if journal is None else journal.width - 1,
        TOKENS=n // seqs,
        WIDTH=conv_weight.shape[1],
        BIAS=p.conv_bias is not None,
        JOURNAL=journal is not None,
        PDL=overlaps,
        PACKED=conv_weight.shape[1] == 4 and conv_weight.element_size() == 2,
        BETA=p.beta_scale,
        PARTS=parts,
        BM=width,
        BG=next_power_of_2(group),
        num_warps=4,
        launch_pdl=overlaps,
    )
    return inputs
