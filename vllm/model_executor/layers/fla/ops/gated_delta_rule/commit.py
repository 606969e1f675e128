# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Writing back what decode steps left in the journal: some batch rows, all layers at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.journal import JournalStack
from vllm.utils.math_utils import cdiv, next_power_of_2

#: dv of a program's tile, and channels that it moves at a time
_ROWS, _CHANNELS = 32, 256


@triton.jit(do_not_specialize=["first_layer"])
def _commit_kernel(
    entries_ptr,
    pending_ptr,
    first_ptr,
    taken_ptr,
    offsets_ptr,
    conv_offsets_ptr,
    keys_ptr,
    errors_ptr,
    decays_ptr,
    inputs_ptr,
    rates_ptr,
    state_ptr,
    conv_ptr,
    first_layer,
    stride_state,
    stride_conv,
    stride_keys,
    stride_errors,
    stride_decays,
    stride_inputs,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PLACES: tl.constexpr,
    KEPT: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr,
    ELEMENT_DECAY: tl.constexpr,
    PAST: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROUND: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid (value heads and dv tiles, rows, layers): the updates that `_decode_kernel` replays; and
    each of the first programs of a row some channels of the convolution's state. `rates_ptr`: of
    the only layer, where elements decay at rates of their own."""
    tiles: tl.constexpr = (DV + BV - 1) // BV
    head, first_row = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * BV
    entry, layer = tl.program_id(1), (first_layer + tl.program_id(2)).to(tl.int64)
    row = tl.load(entries_ptr + entry * 2).to(tl.int64)
    index = tl.load(entries_ptr + entry * 2 + 1).to(tl.int64)
    pending = tl.load(pending_ptr + row)
    place = tl.load(first_ptr + row)
    keys = keys_ptr + layer * stride_keys
    keys += (row * PLACES * K_HEADS + head // (V_HEADS // K_HEADS)) * DK
    errors = errors_ptr + layer * stride_errors + (row * PLACES * V_HEADS + head) * DV
    DECAYS: tl.constexpr = DK if CHANNEL_DECAY else (DV if ELEMENT_DECAY else 1)
    decays = decays_ptr + layer * stride_decays + (row * PLACES * V_HEADS + head) * DECAYS
    dk = tl.arange(0, BK)
    dv = first_row + tl.arange(0, BV)
    in_k, in_v = dk < DK, dv < DV
    inside = in_v[:, None] & in_k[None, :]
    state = state_ptr + tl.load(offsets_ptr + layer) + index * stride_state + head * DV * DK
    stored = state + dv[:, None] * DK + dk[None, :]
    S = tl.load(stored, mask=inside, other=0.0).to(tl.float32)
    if ELEMENT_DECAY:
        log_rates = rates_ptr + head * DV * DK + dv[:, None] * DK + dk[None, :]
        rate = -tl.exp(tl.load(log_rates, mask=inside, other=0.0).to(tl.float32))
    for i in range(pending):
        at = (place + i) % PLACES
        k = tl.load(keys + at * (K_HEADS * DK) + dk, mask=in_k, other=0.0)
        d = tl.load(errors + at * (V_HEADS * DV) + dv, mask=in_v, other=0.0)
        if CHANNEL_DECAY:
            decay = tl.load(decays + at * (V_HEADS * DK) + dk, mask=in_k, other=0.0)
            S = tl.fma(d[:, None], k[None, :], S * decay[None, :])
        elif ELEMENT_DECAY:
            dt = tl.load(decays + at * (V_HEADS * DV) + dv, mask=in_v, other=0.0)
            S = tl.fma(d[:, None], k[None, :], S * tl.exp(rate * dt[:, None]))
        else:
            S = tl.fma(d[:, None], k[None, :], S * tl.load(decays + at * V_HEADS))
        if ROUND:
            S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
    tl.store(stored, S, mask=inside)
    if KEPT > 0:
        taken = tl.load(taken_ptr + row)
        conv = conv_ptr + tl.load(conv_offsets_ptr + layer) + index * stride_conv
        inputs = inputs_ptr + layer * stride_inputs + row * (KEPT * CHANNELS)
        for begin in range(tl.program_id(0) * BC, CHANNELS, tl.num_programs(0) * BC):
            c = begin + tl.arange(0, BC)
            # Place `w` of the state takes what was `taken` inputs later; ascending, so that what a
            # place is filled from has not been written yet.
            for w in tl.static_range(PAST):
                later = w + taken
                kept = tl.load(
                    inputs + (later - PAST) * CHANNELS + c,
                    mask=(c < CHANNELS) & (later >= PAST),
                    other=0.0,
                )
                past = tl.load(
                    conv + later * CHANNELS + c, mask=(c < CHANNELS) & (later < PAST), other=0.0
                )
                value = tl.where(later < PAST, past, kept)
                tl.store(conv + w * CHANNELS + c, value, mask=(c < CHANNELS) & (taken > 0))


def run_commit(stack: JournalStack, entries: Tensor) -> None:
    """See `naive.gdn_commit`; the decays may be those of each key channel, or of each element: then
    a launch for each layer, whose rates are where its parameters are."""
    if not stack.log_rates:
        _launch(stack, entries, None, 0, len(stack.states))
    for layer, rates in enumerate(stack.log_rates):
        _launch(stack, entries, rates, layer, 1)


def _launch(
    stack: JournalStack, entries: Tensor, rates: Tensor | None, first_layer: int, num_layers: int
) -> None:
    _, _, places, num_k_heads, dk = stack.keys.shape
    num_v_heads, dv = stack.errors.shape[3:]
    state, conv_state = stack.states[0], stack.conv_states[0]
    block_v = min(_ROWS, next_power_of_2(dv))
    _commit_kernel[(num_v_heads * cdiv(dv, block_v), len(entries), num_layers)](
        entries,
        stack.pending,
        stack.first,
        stack.taken,
        stack.offsets,
        stack.conv_offsets,
        stack.keys,
        stack.errors,
        stack.decays,
        stack.inputs,
        rates,
        state,
        conv_state,
        first_layer,
        state.stride(0),
        conv_state.stride(0),
        stack.keys.stride(0),
        stack.errors.stride(0),
        stack.decays.stride(0),
        stack.inputs.stride(0),
        K_HEADS=num_k_heads,
        V_HEADS=num_v_heads,
        DK=dk,
        DV=dv,
        PLACES=places,
        KEPT=stack.inputs.shape[2],
        CHANNEL_DECAY=rates is None and stack.decays.dim() == 5,
        ELEMENT_DECAY=rates is not None,
        PAST=conv_state.shape[1],
        CHANNELS=conv_state.shape[2],
        ROUND=state.dtype != torch.float32,
        BK=next_power_of_2(dk),
        BV=block_v,
        BC=_CHANNELS,
        num_warps=4,
    )
