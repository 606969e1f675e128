# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The sequential part of the chunked gated delta rule: states across chunks, and the output.

Per sequence, value head and dv tile, chunk after chunk with the state in fp32 registers:
`V' = T (v - exp(G) k S)`, `O = exp(G) q S + P V'`, then `S = exp(G_C) S + k^T (exp(G_C - G) V')`.
Everything is held transposed (`S^T [dv, dk]`, as the pool stores it): each product's left operand
is then the previous one's result, which stays in registers, and its right operand comes from
memory. Whole chunks come through tensor descriptors where the layout allows, which leaves the
addresses to the hardware; a sequence's last, shorter chunk is masked. The state is read from and
written to the pool here, by state index.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.kernels.chunks import CHUNK
from vllm.kernels.triton.configs import device_configs, pick
from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import (
    describable,
    describe,
    has_descriptors,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem
from vllm.utils.math_utils import cdiv


@triton.jit
def _step(S, q, k, v, T, P, row, q_factor, decay, BT: tl.constexpr):
    """`(S^T after the chunk, O)`."""
    t = tl.arange(0, BT)
    k_factor = tl.load(row + t)
    to_end = tl.load(row + 2 * BT + t)
    dtype: tl.constexpr = k.dtype
    rounded = S.to(dtype)
    v_new = tl.dot(tl.trans(v), tl.trans(T), input_precision="tf32x3")
    seen = tl.dot(rounded, tl.trans(k), input_precision="tf32x3")
    seen = (seen * -k_factor[None, :]).to(dtype)
    v_new = tl.dot(seen, tl.trans(T), v_new, input_precision="tf32x3")
    o = tl.dot(rounded, tl.trans(q), input_precision="tf32x3") * q_factor[None, :]
    o = tl.dot(v_new.to(dtype), tl.trans(P), o, input_precision="tf32x3")
    v_new = (v_new * to_end[None, :]).to(dtype)
    return tl.dot(v_new, k, S * decay, input_precision="tf32x3"), tl.trans(o).to(dtype)


@triton.jit
def _inter_chunk_kernel(
    q_desc,
    k_desc,
    v_desc,
    T_desc,
    P_desc,
    out_desc,
    q_ptr,
    k_ptr,
    v_ptr,
    T_ptr,
    P_ptr,
    rows_ptr,
    out_ptr,
    state_ptr,
    index_ptr,
    carried_ptr,
    starts_ptr,
    offsets_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_out,
    stride_block,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    """Grid (dv tiles, value heads, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2)
    index = tl.load(index_ptr + seq).to(tl.int64)
    first = tl.load(starts_ptr + seq)
    length = tl.load(starts_ptr + seq + 1) - first
    if (index < 0) | (length == 0):
        return
    t, dk = tl.arange(0, BT), tl.arange(0, BK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    in_state = (dv < DV)[:, None] & (dk < DK)[None, :]
    stored = state_ptr + index * stride_block + head * DV * DK + dv[:, None] * DK + dk[None, :]
    S = tl.zeros((BV, BK), tl.float32)
    if tl.load(carried_ptr + seq).to(tl.int1):
        S += tl.load(stored, mask=in_state, other=0.0).to(tl.float32)

    place = tl.load(offsets_ptr + seq) * HEADS + head
    row = rows_ptr + place.to(tl.int64) * 4 * BT
    key_column = (head // GROUP) * DK
    done = 0
    if DESCRIPTORS:
        column = head * DV + tl.program_id(0) * BV
        q_factor = tl.load(row + BT + t)
        decay = tl.load(row + 4 * BT - 1)
        for chunk in tl.range(0, length // BT):
            token = first + chunk * BT
            k = k_desc.load([token, key_column])
            v = v_desc.load([token, column])
            T = T_desc.load([place * BT, 0])
            q = q_desc.load([token, key_column])
            P = P_desc.load([place * BT, 0])
            next_row = row + HEADS * 4 * BT
            more = (chunk + 1) * BT < length
            next_q_factor = tl.load(next_row + BT + t, mask=more, other=0.0)
            next_decay = tl.load(next_row + 4 * BT - 1, mask=more, other=0.0)
            S, o = _step(S, q, k, v, T, P, row, q_factor, decay, BT)
            out_desc.store([token, column], o)
            q_factor, decay, row = next_q_factor, next_decay, next_row
            place += HEADS
        done = length // BT * BT
    start = (first + done).to(tl.int64)
    q_base = q_ptr + start * stride_q + key_column
    k_base = k_ptr + start * stride_k + key_column
    v_base = v_ptr + start * stride_v + head * DV
    out = out_ptr + start * stride_out + head * DV
    square = t[:, None] * BT + t[None, :]
    T_base = T_ptr + place.to(tl.int64) * BT * BT
    P_base = P_ptr + place.to(tl.int64) * BT * BT
    for behind in tl.range(done, length, BT, num_stages=MASKED_STAGES):
        valid = t < length - behind
        in_k = valid[:, None] & (dk < DK)[None, :]
        in_v = valid[:, None] & (dv < DV)[None, :]
        k = tl.load(k_base + t[:, None] * stride_k + dk[None, :], mask=in_k, other=0.0)
        v = tl.load(v_base + t[:, None] * stride_v + dv[None, :], mask=in_v, other=0.0)
        T = tl.load(T_base + square)
        q = tl.load(q_base + t[:, None] * stride_q + dk[None, :], mask=in_k, other=0.0)
        P = tl.load(P_base + square)
        q_factor = tl.load(row + BT + t)
        decay = tl.load(row + 4 * BT - 1)
        S, o = _step(S, q, k, v, T, P, row, q_factor, decay, BT)
        tl.store(out + t[:, None] * stride_out + dv[None, :], o, mask=in_v)
        k_base += BT * stride_k
        q_base += BT * stride_q
        v_base += BT * stride_v
        out += BT * stride_out
        T_base += HEADS * BT * BT
        P_base += HEADS * BT * BT
        row += HEADS * 4 * BT
    tl.store(stored, S, mask=in_state)


def _use_descriptors(p: ChunkedProblem, out: Tensor, block_v: int) -> bool:
    whole = p.head_k_dim == p.block_k and p.head_v_dim % block_v == 0
    aligned = all(describable(x) for x in (p.q, p.k, p.v, out))
    return whole and aligned and not p.wide and has_descriptors(p.v.device)


def inter_chunk(p: ChunkedProblem, factors: ChunkFactors, out: Tensor) -> None:
    """Fill `out [tokens, heads, dv]` (dense heads, any token stride) and update the pool."""
    _, heads, dv = p.v.shape
    configs = device_configs(p.v.device)
    tile = pick(configs.gdn_state_fp32 if p.wide else configs.gdn_state, p.head_k_dim)
    block_v = min(tile.columns, p.block_v)
    described: list[TensorDescriptor | None] = [None] * 6
    if descriptors := _use_descriptors(p, out, block_v):
        described = [
            describe(p.q, CHUNK, p.block_k),
            describe(p.k, CHUNK, p.block_k),
            describe(p.v, CHUNK, block_v),
            describe(factors.T.view(-1, CHUNK), CHUNK, CHUNK),
            describe(factors.P.view(-1, CHUNK), CHUNK, CHUNK),
            describe(out, CHUNK, block_v),
        ]
    _inter_chunk_kernel[(cdiv(dv, block_v), heads, p.num_seqs)](
        *described,
        p.q,
        p.k,
        p.v,
        factors.T,
        factors.P,
        factors.rows,
        out,
        p.ssm_state,
        p.state_indices,
        p.has_initial_state,
        p.query_start_loc,
        p.chunk_offsets,
        p.q.stride(0),
        p.k.stride(0),
        p.v.stride(0),
        out.stride(0),
        p.ssm_state.stride(0),
        HEADS=heads,
        GROUP=p.group,
        DK=p.head_k_dim,
        DV=dv,
        BK=p.block_k,
        BV=block_v,
        BT=CHUNK,
        DESCRIPTORS=descriptors,
        MASKED_STAGES=1 if descriptors else tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
