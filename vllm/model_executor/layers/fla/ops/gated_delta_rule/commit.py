# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Writing back what decode steps left in the ring, for some batch rows and all layers at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.decode_ring import RingStack
from vllm.utils.math_utils import cdiv, next_power_of_2

#: dv of a program's tile
_ROWS = 32


@triton.jit
def _commit_kernel(
    entries_ptr,
    offsets_ptr,
    keys_ptr,
    errors_ptr,
    decays_ptr,
    state_ptr,
    stride_state,
    stride_keys,
    stride_errors,
    stride_decays,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SLOTS: tl.constexpr,
    ROUND: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (value heads and dv tiles, rows, layers): the updates that `_decode_kernel` replays."""
    tiles: tl.constexpr = (DV + BV - 1) // BV
    head, first = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * BV
    entry, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slots = tl.load(entries_ptr + entry * 4).to(tl.int64) * SLOTS
    pending = tl.load(entries_ptr + entry * 4 + 1)
    index = tl.load(entries_ptr + entry * 4 + 2).to(tl.int64)
    keys = keys_ptr + layer * stride_keys
    keys += (slots * K_HEADS + head // (V_HEADS // K_HEADS)) * DK
    errors = errors_ptr + layer * stride_errors + (slots * V_HEADS + head) * DV
    decays = decays_ptr + layer * stride_decays + slots * V_HEADS + head
    dk = tl.arange(0, BK)
    dv = first + tl.arange(0, BV)
    in_k, in_v = dk < DK, dv < DV
    inside = in_v[:, None] & in_k[None, :]
    state = state_ptr + tl.load(offsets_ptr + layer) + index * stride_state + head * DV * DK
    stored = state + dv[:, None] * DK + dk[None, :]
    S = tl.load(stored, mask=inside, other=0.0).to(tl.float32)
    for i in range(pending):
        k = tl.load(keys + i * (K_HEADS * DK) + dk, mask=in_k, other=0.0)
        d = tl.load(errors + i * (V_HEADS * DV) + dv, mask=in_v, other=0.0)
        S = tl.fma(d[:, None], k[None, :], S * tl.load(decays + i * V_HEADS))
        if ROUND:
            S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
    tl.store(stored, S, mask=inside)


def run_commit(rings: RingStack, entries: Tensor) -> None:
    """See `Kernels.gdn_commit`."""
    layers, _, slots, num_k_heads, dk = rings.keys.shape
    num_v_heads, dv = rings.errors.shape[3:]
    state = rings.states[0]
    block_v = min(_ROWS, next_power_of_2(dv))
    _commit_kernel[(num_v_heads * cdiv(dv, block_v), len(entries), layers)](
        entries,
        rings.offsets,
        rings.keys,
        rings.errors,
        rings.decays,
        state,
        state.stride(0),
        rings.keys.stride(0),
        rings.errors.stride(0),
        rings.decays.stride(0),
        K_HEADS=num_k_heads,
        V_HEADS=num_v_heads,
        DK=dk,
        DV=dv,
        SLOTS=slots,
        ROUND=state.dtype != torch.float32,
        BK=next_power_of_2(dk),
        BV=block_v,
        num_warps=4,
    )
