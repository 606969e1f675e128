# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The recurrent steps of a few decode tokens per sequence of Kimi delta attention.

Memory-bound: a program reads some rows of one state once. With a `Journal` it writes them only in
steps that commit: it replays the tokens that are not committed, operation by operation as the steps
that brought them.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from vllm.model_executor.layers.fla.ops.gated_delta_rule.decode import DecodeLaunch
from vllm.model_executor.layers.fla.ops.gated_delta_rule.decode_inputs import overlaps_launches
from vllm.model_executor.layers.fla.ops.kda.decode_inputs import decode_inputs
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode
from vllm.utils.math_utils import cdiv, next_power_of_2

#: sequences from which programs of half a head, whose loads and arithmetic overlap, are faster
_MANY = 32


def launch_for(num_seqs: int, head_k_dim: int, head_v_dim: int) -> DecodeLaunch:
    """Few sequences: a whole head per program, 128 values of the state per thread. Many: half a
    head, 64 values (measured on an H200)."""
    columns, rows = next_power_of_2(head_k_dim), next_power_of_2(head_v_dim)
    values = 128
    if num_seqs >= _MANY:
        rows, values = min(64, rows), 64
    return DecodeLaunch(rows, min(16, max(1, columns * rows // (values * 32))))


@triton.jit
def _contract(S, x):
    """`[rows, R, chunks, columns] * [chunks, columns]` summed over both -> `[rows, R]`."""
    return tl.sum(tl.sum(S * x[None, None, :, :], axis=2), axis=2)


@triton.jit
def _decode_kernel(
    vectors_ptr,
    betas_ptr,
    state_ptr,
    index_ptr,
    steps_ptr,
    keys_ptr,
    errors_ptr,
    decays_ptr,
    out_ptr,
    stride_state,
    stride_out,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    JOURNAL: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (heads, sequences, dv tiles). A tile of a state is `[BV / BR, BR, BK / BW, BW]`: the
    middle dimensions lie within a thread, so that a warp holds whole rows of few columns, and sums
    over dk are short."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    BC: tl.constexpr = BK // BW
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        if PDL:
            cuda.gdc_wait()
        return
    dk = tl.arange(0, BC)[:, None] * BW + tl.arange(0, BW)[None, :]
    dv = tl.arange(0, BV // BR)[:, None] * BR + tl.arange(0, BR)[None, :]
    dv += tl.program_id(2) * BV
    in_k, in_v = dk < DK, dv < DV
    stored = state_ptr + index * stride_state + head * DV * DK
    stored += dv[:, :, None, None] * DK + dk[None, None, :, :]
    inside = in_v[:, :, None, None] & in_k[None, None, :, :]
    S = tl.load(stored, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if JOURNAL:
        row = tl.load(steps_ptr + seq * 4).to(tl.int64) * PLACES
        pending = tl.load(steps_ptr + seq * 4 + 1)
        commit = tl.load(steps_ptr + seq * 4 + 2)
        place = tl.load(steps_ptr + seq * 4 + 3)
        keys = keys_ptr + (row * HEADS + head) * DK
        decays = decays_ptr + (row * HEADS + head) * DK
        errors = errors_ptr + (row * HEADS + head) * DV
        for i in tl.range(pending, num_stages=STAGES):
            at = (place + i) % PLACES
            k_i = tl.load(keys + at * (HEADS * DK) + dk, mask=in_k, other=0.0)
            decay_i = tl.load(decays + at * (HEADS * DK) + dk, mask=in_k, other=0.0)
            d_i = tl.load(errors + at * (HEADS * DV) + dv, mask=in_v, other=0.0)
            S = tl.fma(d_i[:, :, None, None], k_i[None, None, :, :], S * decay_i[None, None, :, :])
            if ROUND:
                S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
    for t in tl.static_range(TOKENS):
        token = seq * TOKENS + t
        vectors = vectors_ptr + (token * HEADS + head) * (4 * BM)
        q = tl.load(vectors + dk, mask=in_k, other=0.0)
        k = tl.load(vectors + BM + dk, mask=in_k, other=0.0)
        v = tl.load(vectors + 2 * BM + dv, mask=in_v, other=0.0)
        decay = tl.load(vectors + 3 * BM + dk, mask=in_k, other=0.0)
        beta = tl.load(betas_ptr + token * HEADS + head)
        kq = tl.sum(tl.sum(k * q, axis=0), axis=0)
        S = S * decay[None, None, :, :]
        error = beta * (v - _contract(S, k))
        o = _contract(S, q) + kq * error
        tl.store(out_ptr + token * stride_out + head * DV + dv, o, mask=in_v)
        if JOURNAL:
            if (t == 0) & (commit != 0):
                written = tl.fma(error[:, :, None, None], k[None, None, :, :], S)
                tl.store(stored, written, mask=inside, eviction_policy="evict_first")
            else:
                at = (place + pending + t - commit) % PLACES
                tl.store(errors + at * (HEADS * DV) + dv, error, mask=in_v)
            if t + 1 < TOKENS:
                S = tl.fma(error[:, :, None, None], k[None, None, :, :], S)
                if ROUND:
                    S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
        else:
            S = tl.fma(error[:, :, None, None], k[None, None, :, :], S)
            tl.store(stored, S, mask=inside, eviction_policy="evict_first")


def run_decode(p: KdaDecode) -> None:
    """See `naive.kda_decode`. The second of two launches reads states and journal during the
    first."""
    heads, _, dk, dv = p.heads
    seqs, journal = len(p.state_indices), p.journal
    if seqs == 0:
        return
    overlaps = overlaps_launches(p.qkv.device)
    inputs = decode_inputs(p, overlaps)
    launch = launch_for(seqs, dk, dv)
    block_k, block_v = next_power_of_2(dk), min(launch.rows, next_power_of_2(dv))
    _decode_kernel[(heads, seqs, cdiv(dv, block_v))](
        inputs.vectors,
        inputs.betas,
        p.state,
        p.state_indices,
        None if journal is None else journal.steps,
        None if journal is None else journal.keys,
        None if journal is None else journal.errors,
        None if journal is None else journal.decays,
        p.out,
        p.state.stride(0),
        p.out.stride(0),
        HEADS=heads,
        DK=dk,
        DV=dv,
        PLACES=1 if journal is None else journal.places,
        TOKENS=p.width,
        JOURNAL=journal is not None,
        ROUND=p.state.dtype != torch.float32,
        PDL=overlaps,
        BK=block_k,
        BW=min(launch.columns, block_k),
        BV=block_v,
        BM=inputs.vectors.shape[-1],
        BR=min(launch.inner, block_v),
        STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        launch_pdl=overlaps,
    )
