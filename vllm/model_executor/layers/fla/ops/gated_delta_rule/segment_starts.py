# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What the segments of a sequence start from, found for all of them at once.

With the state held transposed, `X = S^T [dv, dk]`, a chunk is linear in it (letters as in
`inter.py`): `X -> X (exp(G_C) - (exp(G) k)^T T^T D k) + v^T T^T D k`, `D = diag(exp(G_C - G))`.
So is a segment of many: `X -> X M + L`, where the rows of `M [dk, dk]` are what the rows of the
identity become without values, and `L` what zeros become with them. First `M` and `L` of all
segments, then the states between segments one after another (`X M + L` with fp32 accuracy).

A segment's end is `L` alone where its memory does not reach back to its start: keys of length one
and `beta <= 2` never enlarge a state, so `exp(G)` bounds `M`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.kernels.chunks import CHUNK
from vllm.kernels.triton.configs import Tile, device_configs, pick
from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import (
    describable,
    describe,
    has_descriptors,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import ScanSegments
from vllm.utils.math_utils import cdiv

JOIN = Tile(rows=16, columns=128, num_warps=8, num_stages=3)
# Of a state that decayed further nothing is visible in any dtype.
FORGOTTEN_LOG2: tl.constexpr = tl.constexpr(-64.0)


@triton.jit
def _chunks_forgotten(decays_ptr, stride, length, BLOCK: tl.constexpr):
    """How many of a segment's `length` chunks have decayed beyond notice at its end."""
    i = tl.arange(0, BLOCK)
    later = 0.0
    forgotten = 0
    for block in tl.range(0, tl.cdiv(length, BLOCK)):
        chunk = length - (block + 1) * BLOCK + i
        decay = tl.load(decays_ptr + chunk * stride, mask=chunk >= 0, other=1.0)
        decay = tl.log2(decay)
        since = later + tl.cumsum(decay, axis=0, reverse=True)
        forgotten += tl.sum(((since < FORGOTTEN_LOG2) & (chunk >= 0)).to(tl.int32), axis=0)
        later += tl.sum(decay, axis=0)
    return forgotten


@triton.jit
def _advance(X, new, k, T, row, BT: tl.constexpr):
    """`X` after a chunk that adds the values `new = (T v)^T`, without the chunk's decay of `X`."""
    t = tl.arange(0, BT)
    k_factor = tl.load(row + t)
    to_end = tl.load(row + 2 * BT + t)
    decay = tl.load(row + 4 * BT - 1)
    seen = tl.dot(X.to(k.dtype), tl.trans(k), input_precision="tf32x3")
    seen = (seen * -k_factor[None, :]).to(k.dtype)
    new = tl.dot(seen, tl.trans(T), new, input_precision="tf32x3")
    new = (new * to_end[None, :]).to(k.dtype)
    return tl.dot(new, k, X * decay, input_precision="tf32x3")


@triton.jit
def _segments_kernel(
    k_desc,
    v_desc,
    T_desc,
    k_ptr,
    v_ptr,
    T_ptr,
    rows_ptr,
    pool_ptr,
    index_ptr,
    carried_ptr,
    starts_ptr,
    offsets_ptr,
    owners_ptr,
    firsts_ptr,
    states_ptr,
    M_ptr,
    stride_k,
    stride_v,
    stride_block,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BX: tl.constexpr,
    BT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Grid (dv tiles, then dk tiles; value heads; segments).

    `states[segment + 1]` gets `L`, and what a sequence starts from goes where it starts.
    """
    TILES_V: tl.constexpr = (DV + BX - 1) // BX
    tile, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    owner = tl.load(owners_ptr + segment)
    first = tl.load(firsts_ptr + owner)
    last = tl.load(firsts_ptr + owner + 1) - 1
    index = tl.load(index_ptr + owner).to(tl.int64)
    makes_L = tile < TILES_V
    if (index < 0) | ((segment == last) & (segment != first)):
        return
    if (segment == first) & (tile >= TILES_V):
        return
    dk, t = tl.arange(0, BK), tl.arange(0, BT)
    r = tl.where(makes_L, tile, tile - TILES_V) * BX + tl.arange(0, BX)
    in_X = (r < tl.where(makes_L, DV, DK))[:, None] & (dk < DK)[None, :]
    square = r[:, None] * DK + dk[None, :]
    place = segment.to(tl.int64) * HEADS + head
    start_chunk = tl.load(offsets_ptr + segment)
    length = tl.load(offsets_ptr + segment + 1) - start_chunk
    row = rows_ptr + (start_chunk.to(tl.int64) * HEADS + head) * 4 * BT
    forgotten = _chunks_forgotten(row + 4 * BT - 1, HEADS * 4 * BT, length, 128)
    skipped = tl.maximum(forgotten - 1, 0)
    X = tl.zeros((BX, BK), tl.float32)
    if segment == first:
        if tl.load(carried_ptr + owner).to(tl.int1):
            X += tl.load(
                pool_ptr + index * stride_block + head * DV * DK + square, mask=in_X, other=0.0
            ).to(tl.float32)
        tl.store(states_ptr + place * DV * DK + square, X, mask=in_X)
        if segment == last:
            return
        X = tl.where(skipped > 0, 0.0, X)

    start_chunk += skipped
    row += skipped.to(tl.int64) * HEADS * 4 * BT
    start = tl.load(starts_ptr + segment) + skipped * BT
    key_column = (head // GROUP) * DK
    chunk_place = start_chunk * HEADS + head
    in_k = (dk < DK)[None, :]
    T_square = t[:, None] * BT + t[None, :]
    if makes_L:
        for _ in tl.range(0, length - skipped):
            if DESCRIPTORS:
                k = k_desc.load([start, key_column])
                v = v_desc.load([start, head * DV + tile * BX])
                T = T_desc.load([chunk_place * BT, 0])
            else:
                token = start.to(tl.int64) + t[:, None]
                k = tl.load(
                    k_ptr + token * stride_k + key_column + dk[None, :], mask=in_k, other=0.0
                )
                v = tl.load(
                    v_ptr + token * stride_v + head * DV + r[None, :],
                    mask=(r < DV)[None, :],
                    other=0.0,
                )
                T = tl.load(T_ptr + chunk_place.to(tl.int64) * BT * BT + T_square)
            new = tl.dot(tl.trans(v), tl.trans(T), input_precision="tf32x3")
            X = _advance(X, new, k, T, row, BT)
            start += BT
            chunk_place += HEADS
            row += HEADS * 4 * BT
        tl.store(states_ptr + (place + HEADS) * DV * DK + square, X, mask=in_X)
    else:
        identity = (r[:, None] == dk[None, :]) & (forgotten == 0)
        X = tl.where(identity & in_X, 1.0, X)
        todo = tl.where(forgotten > 0, 0, length)
        for _ in tl.range(0, todo):
            if DESCRIPTORS:
                k = k_desc.load([start, key_column])
                T = T_desc.load([chunk_place * BT, 0])
            else:
                token = start.to(tl.int64) + t[:, None]
                k = tl.load(
                    k_ptr + token * stride_k + key_column + dk[None, :], mask=in_k, other=0.0
                )
                T = tl.load(T_ptr + chunk_place.to(tl.int64) * BT * BT + T_square)
            X = _advance(X, tl.zeros((BX, BT), tl.float32), k, T, row, BT)
            start += BT
            chunk_place += HEADS
            row += HEADS * 4 * BT
        tl.store(M_ptr + place * DK * DK + square, X, mask=in_X)


@triton.jit
def _join_kernel(
    states_ptr,
    M_ptr,
    firsts_ptr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (dv tiles, value heads, sequences): what every segment starts from, in place of `L`."""
    head, seq = tl.program_id(1), tl.program_id(2)
    first = tl.load(firsts_ptr + seq)
    last = tl.load(firsts_ptr + seq + 1) - 1
    if last - first < 2:
        return
    d, dk = tl.arange(0, BK), tl.arange(0, BK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    in_X = (dv < DV)[:, None] & (dk < DK)[None, :]
    in_M = (d < DK)[:, None] & (dk < DK)[None, :]
    place = (first + 1).to(tl.int64) * HEADS + head
    states = states_ptr + place * DV * DK + dv[:, None] * DK + dk[None, :]
    M_base = M_ptr + place * DK * DK + d[:, None] * DK + dk[None, :]
    X = tl.load(states, mask=in_X, other=0.0)
    for _ in tl.range(first + 1, last):
        states += HEADS * DV * DK
        M = tl.load(M_base, mask=in_M, other=0.0)
        L = tl.load(states, mask=in_X, other=0.0)
        X = tl.dot(X, M, L, input_precision="tf32x3")
        tl.store(states, X, mask=in_X)
        M_base += HEADS * DK * DK


@dataclass(frozen=True)
class _Scratch:
    """`states [segments, heads, dv, dk]` and `M [segments, heads, dk, dk]`, fp32."""

    states: Tensor
    M: Tensor


def _allocate(p: ChunkedProblem, segments: ScanSegments) -> _Scratch:
    heads, dv, dk, device = p.v.shape[1], p.head_v_dim, p.head_k_dim, p.v.device
    return _Scratch(
        states=torch.empty(len(segments), heads, dv, dk, device=device),
        M=torch.empty(len(segments), heads, dk, dk, device=device),
    )


def segment_starts(p: ChunkedProblem, factors: ChunkFactors, segments: ScanSegments) -> Tensor:
    """`[segments, v heads, dv, dk]` fp32: the state each segment starts from.

    Raises:
        ValueError: keys that are not normalised may enlarge a state, so none is ever forgotten.
    """
    if not p.l2norm:
        raise ValueError("scans are cut for normalised keys only")
    scratch = _allocate(p, segments)
    _scan_from_nothing(p, factors, segments, scratch)
    _join(p, segments, scratch)
    return scratch.states


def _scan_from_nothing(
    p: ChunkedProblem, factors: ChunkFactors, segments: ScanSegments, scratch: _Scratch
) -> None:
    heads, dv, dk = p.v.shape[1], p.head_v_dim, p.head_k_dim
    configs = device_configs(p.v.device)
    tile: Tile = pick(configs.gdn_state_fp32 if p.wide else configs.gdn_state, dk)
    block = min(tile.columns, p.block_v)
    described: list[TensorDescriptor | None] = [None] * 3
    if descriptors := _use_descriptors(p, block):
        described = [
            describe(p.k, CHUNK, p.block_k),
            describe(p.v, CHUNK, block),
            describe(factors.T.view(-1, CHUNK), CHUNK, CHUNK),
        ]
    _segments_kernel[(cdiv(dv, block) + cdiv(dk, block), heads, len(segments))](
        *described,
        p.k,
        p.v,
        factors.T,
        factors.rows,
        p.ssm_state,
        p.state_indices,
        p.has_initial_state,
        segments.starts,
        segments.chunk_offsets,
        segments.owners,
        segments.firsts,
        scratch.states,
        scratch.M,
        p.k.stride(0),
        p.v.stride(0),
        p.ssm_state.stride(0),
        HEADS=heads,
        GROUP=p.group,
        DK=dk,
        DV=dv,
        BK=p.block_k,
        BX=block,
        BT=CHUNK,
        DESCRIPTORS=descriptors,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _use_descriptors(p: ChunkedProblem, block: int) -> bool:
    whole = p.head_k_dim == p.block_k and p.head_v_dim % block == 0
    aligned = describable(p.k) and describable(p.v)
    return whole and aligned and not p.wide and has_descriptors(p.v.device)


def _join(p: ChunkedProblem, segments: ScanSegments, scratch: _Scratch) -> None:
    heads, dv = p.v.shape[1], p.head_v_dim
    _join_kernel[(cdiv(dv, JOIN.rows), heads, p.num_seqs)](
        scratch.states,
        scratch.M,
        segments.firsts,
        HEADS=heads,
        DK=p.head_k_dim,
        DV=dv,
        BK=p.block_k,
        BV=JOIN.rows,
        num_warps=JOIN.num_warps,
        num_stages=JOIN.num_stages,
    )
