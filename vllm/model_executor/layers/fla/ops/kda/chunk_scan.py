# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The sequential part of chunked Kimi delta attention: states across chunks, and the output.

As the gated delta rule's (`gated_delta_rule/inter.py`), everything transposed and the state in fp32
registers, with a decay for each column of it. The letters are those of `chunk_factors.py`.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.kernels.chunks import CHUNK
from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import (
    describable,
    describe,
    has_descriptors,
)
from vllm.model_executor.layers.fla.ops.kda.chunk_factors import ChunkFactors
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill
from vllm.utils.math_utils import cdiv

#: columns of the state (dv) that a program carries, and its warps
_COLUMNS, _WARPS, _STAGES = 64, 4, 2


@triton.jit
def _step(S, queries, keys, ends, v, T, P, decay):
    """`(S^T after the chunk, O)`."""
    dtype: tl.constexpr = keys.dtype
    rounded = S.to(dtype)
    seen = tl.dot(rounded, tl.trans(keys), input_precision="tf32x3")
    o = tl.dot(rounded, tl.trans(queries), input_precision="tf32x3")
    unseen = (tl.trans(v).to(tl.float32) - seen).to(dtype)
    v_new = tl.dot(unseen, tl.trans(T), input_precision="tf32x3").to(dtype)
    S = tl.dot(v_new, ends, S * decay[None, :], input_precision="tf32x3")
    o = tl.dot(v_new, tl.trans(P), o, input_precision="tf32x3")
    return S, tl.trans(o).to(dtype)


@triton.jit
def _scan_kernel(
    queries_desc,
    keys_desc,
    ends_desc,
    v_desc,
    T_desc,
    P_desc,
    out_desc,
    queries_ptr,
    keys_ptr,
    ends_ptr,
    v_ptr,
    T_ptr,
    P_ptr,
    decays_ptr,
    out_ptr,
    state_ptr,
    index_ptr,
    carried_ptr,
    starts_ptr,
    offsets_ptr,
    stride_v,
    stride_out,
    stride_state,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    """Grid (dv tiles, heads, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2)
    index = tl.load(index_ptr + seq).to(tl.int64)
    first = tl.load(starts_ptr + seq)
    length = tl.load(starts_ptr + seq + 1) - first
    if (index < 0) | (length == 0):
        return
    t, dk = tl.arange(0, BT), tl.arange(0, BK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = dk < DK, dv < DV
    in_state = in_v[:, None] & in_k[None, :]
    stored = state_ptr + index * stride_state + head * DV * DK + dv[:, None] * DK + dk[None, :]
    S = tl.zeros((BV, BK), tl.float32)
    if tl.load(carried_ptr + seq).to(tl.int1):
        S += tl.load(stored, mask=in_state, other=0.0).to(tl.float32)

    place = tl.load(offsets_ptr + seq) * HEADS + head
    done = 0
    if DESCRIPTORS:
        column = head * DV + tl.program_id(0) * BV
        for chunk in tl.range(0, length // BT):
            token = first + chunk * BT
            keys = keys_desc.load([place * BT, 0])
            v = v_desc.load([token, column])
            T = T_desc.load([place * BT, 0])
            ends = ends_desc.load([place * BT, 0])
            queries = queries_desc.load([place * BT, 0])
            P = P_desc.load([place * BT, 0])
            decay = tl.load(decays_ptr + place.to(tl.int64) * DK + dk, mask=in_k, other=0.0)
            S, o = _step(S, queries, keys, ends, v, T, P, decay)
            out_desc.store([token, column], o)
            place += HEADS
        done = length // BT * BT
    tile = t[:, None] * DK + dk[None, :]
    square = t[:, None] * BT + t[None, :]
    for behind in tl.range(done, length, BT, num_stages=MASKED_STAGES):
        token = (first + behind).to(tl.int64)
        valid = (t < length - behind)[:, None]
        wide = place.to(tl.int64)
        of_tile = wide * (BT * DK) + tile
        keys = tl.load(keys_ptr + of_tile, mask=in_k[None, :], other=0.0)
        of_v = token * stride_v + t[:, None] * stride_v + head * DV + dv[None, :]
        v = tl.load(v_ptr + of_v, mask=valid & in_v[None, :], other=0.0)
        T = tl.load(T_ptr + wide * (BT * BT) + square)
        ends = tl.load(ends_ptr + of_tile, mask=in_k[None, :], other=0.0)
        queries = tl.load(queries_ptr + of_tile, mask=in_k[None, :], other=0.0)
        P = tl.load(P_ptr + wide * (BT * BT) + square)
        decay = tl.load(decays_ptr + wide * DK + dk, mask=in_k, other=0.0)
        S, o = _step(S, queries, keys, ends, v, T, P, decay)
        of_out = token * stride_out + t[:, None] * stride_out + head * DV + dv[None, :]
        tl.store(out_ptr + of_out, o, mask=valid & in_v[None, :])
        place += HEADS
    tl.store(stored, S, mask=in_state)


def _use_descriptors(p: KdaPrefill, block_v: int) -> bool:
    _, _, dk, dv = p.heads
    whole = dk == p.block_k and dv % block_v == 0 and p.qkv.element_size() == 2
    return whole and describable(p.qkv) and describable(p.out) and has_descriptors(p.qkv.device)


def scan_chunks(p: KdaPrefill, factors: ChunkFactors) -> None:
    """Fill `p.out` and each sequence's block."""
    heads, _, dk, dv = p.heads
    block_v = min(_COLUMNS, p.block_v)
    v = p.qkv[:, 2 * heads * dk :].unflatten(1, (heads, dv))
    described: list[TensorDescriptor | None] = [None] * 7
    if descriptors := _use_descriptors(p, block_v):
        described = [
            describe(factors.queries.view(-1, dk), CHUNK, dk),
            describe(factors.keys.view(-1, dk), CHUNK, dk),
            describe(factors.ends.view(-1, dk), CHUNK, dk),
            describe(v, CHUNK, block_v),
            describe(factors.T.view(-1, CHUNK), CHUNK, CHUNK),
            describe(factors.P.view(-1, CHUNK), CHUNK, CHUNK),
            describe(p.out, CHUNK, block_v),
        ]
    _scan_kernel[(cdiv(dv, block_v), heads, len(p.state_indices))](
        *described,
        factors.queries,
        factors.keys,
        factors.ends,
        v,
        factors.T,
        factors.P,
        factors.decays,
        p.out,
        p.state,
        p.state_indices,
        p.has_initial_state,
        p.query_start_loc,
        p.chunk_offsets,
        v.stride(0),
        p.out.stride(0),
        p.state.stride(0),
        HEADS=heads,
        DK=dk,
        DV=dv,
        BK=p.block_k,
        BV=block_v,
        BT=CHUNK,
        DESCRIPTORS=descriptors,
        MASKED_STAGES=1,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
