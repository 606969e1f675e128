# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The recurrent steps of a few decode tokens per sequence, with the gated norm.

Memory-bound: a program reads the state of one value head once. With a `Journal` it writes it only
in steps that commit: it replays the tokens not yet committed, operation by operation as the steps
that brought them did, so the bits are those of writing with every token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from vllm.kernels.journal import GatedNorm
from vllm.model_executor.layers.fla.ops.gated_delta_rule.decode_inputs import DecodeInputs
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode
from vllm.utils.math_utils import cdiv, next_power_of_2


@dataclass(frozen=True)
class DecodeLaunch:
    """A state tile has `rows` (dv) without the norm, which needs a whole head. A thread holds
    `inner` adjacent rows; `columns` (dk) are spread over threads, the rest of dk is in each.
    `num_stages` of the loop over pending tokens."""

    rows: int
    num_warps: int
    num_stages: int = 4
    inner: int = 4
    columns: int = 32
    max_registers: int | None = None


#: sequences from which small programs, whose loads and arithmetic overlap, beat a fused norm
_MANY = 32


def launch_for(num_seqs: int, head_k_dim: int, head_v_dim: int) -> DecodeLaunch:
    """Few threads, so that little is read more than once (measured on an H200).

    Few sequences: a whole head per program, 128 values of the state per thread. Many: a quarter.
    """
    columns, rows = next_power_of_2(head_k_dim), next_power_of_2(head_v_dim)
    if num_seqs < _MANY:
        return DecodeLaunch(rows, min(16, max(1, columns * rows // (128 * 32))))
    rows = min(32, rows)
    warps = min(16, max(1, columns * rows // (64 * 32)))
    return DecodeLaunch(rows, warps, max_registers=128)


@triton.jit
def _contract(S, x):
    """`[rows, R, chunks, columns] * [chunks, columns]` summed over both -> `[rows, R]`."""
    return tl.sum(tl.sum(S * x[None, None, :, :], axis=2), axis=2)


@triton.jit
def _decode_kernel(
    vectors_ptr,
    scalars_ptr,
    state_ptr,
    index_ptr,
    steps_ptr,
    keys_ptr,
    errors_ptr,
    decays_ptr,
    gate_ptr,
    norm_ptr,
    out_ptr,
    eps,
    stride_state,
    stride_gate,
    stride_out,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    JOURNAL: tl.constexpr,
    NORM: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (value heads, sequences, dv tiles; one tile with NORM).

    A state is a `[BV / BR, BR, BK / BW, BW]` tile: the middle dimensions lie within a thread, so
    that a warp holds whole rows of few columns, and sums over dk are short.
    """
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * BV
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    BC: tl.constexpr = BK // BW
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        if PDL:
            cuda.gdc_wait()
        return
    dk = tl.arange(0, BC)[:, None] * BW + tl.arange(0, BW)[None, :]
    dv = first + tl.arange(0, BV // BR)[:, None] * BR + tl.arange(0, BR)[None, :]
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
        keys = keys_ptr + (row * K_HEADS + head // GROUP) * DK
        errors = errors_ptr + (row * V_HEADS + head) * DV
        decays = decays_ptr + row * V_HEADS + head
        places = tl.arange(0, BS)
        waits = (places + PLACES - place) % PLACES < pending
        waits = waits & (places < PLACES)
        all_decays = tl.load(decays + places * V_HEADS, mask=waits, other=0.0)
        for i in tl.range(pending, num_stages=STAGES):
            at = (place + i) % PLACES
            k_i = tl.load(keys + at * (K_HEADS * DK) + dk, mask=in_k, other=0.0)
            d_i = tl.load(errors + at * (V_HEADS * DV) + dv, mask=in_v, other=0.0)
            decay_i = tl.sum(tl.where(places == at, all_decays, 0.0), axis=0)
            S = tl.fma(d_i[:, :, None, None], k_i[None, None, :, :], S * decay_i)
            if ROUND:
                S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
    kh, member = head // GROUP, head % GROUP
    if NORM:
        w = tl.load(norm_ptr + dv, mask=in_v, other=0.0)
    for t in tl.static_range(TOKENS):
        token = seq * TOKENS + t
        vectors = vectors_ptr + (token * K_HEADS + kh) * ((2 + GROUP) * BM)
        scalars = scalars_ptr + (token * V_HEADS + head) * 2
        q = tl.load(vectors + dk, mask=in_k, other=0.0)
        k = tl.load(vectors + BM + dk, mask=in_k, other=0.0)
        v = tl.load(vectors + (2 + member) * BM + dv, mask=in_v, other=0.0)
        decay = tl.load(scalars)
        beta = tl.load(scalars + 1)
        if NORM:
            z = tl.load(gate_ptr + token * stride_gate + head * DV + dv, mask=in_v, other=0.0)
        kq = tl.sum(tl.sum(k * q, axis=0), axis=0)
        S = S * decay
        error = beta * (v - _contract(S, k))
        o = (_contract(S, q) + kq * error).to(out_ptr.dtype.element_ty)
        if NORM:
            wide = o.to(tl.float32)
            normed = wide * tl.rsqrt(tl.sum(tl.sum(wide * wide, axis=1), axis=0) / DV + eps)
            normed = normed.to(o.dtype).to(tl.float32) * w.to(tl.float32)
            if w.dtype == o.dtype:
                normed = normed.to(o.dtype).to(tl.float32)
            z = z.to(tl.float32)
            o = normed * z * tl.sigmoid(z)
        tl.store(out_ptr + token * stride_out + head * DV + dv, o, mask=in_v)
        if JOURNAL:
            if (t == 0) & (commit != 0):
                written = tl.fma(error[:, :, None, None], k[None, None, :, :], S)
                tl.store(stored, written, mask=inside, eviction_policy="evict_first")
            else:
                at = (place + pending + t - commit) % PLACES
                tl.store(errors + at * (V_HEADS * DV) + dv, error, mask=in_v)
            if t + 1 < TOKENS:
                S = tl.fma(error[:, :, None, None], k[None, None, :, :], S)
                if ROUND:
                    S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
        else:
            S = tl.fma(error[:, :, None, None], k[None, None, :, :], S)
            tl.store(stored, S, mask=inside, eviction_policy="evict_first")


def run_decode(
    p: GdnDecode, inputs: DecodeInputs, norm: GatedNorm | None, launch: DecodeLaunch, overlaps: bool
) -> None:
    """Fill `p.out` and update states or journal; `norm`: what of `p.norm` is fused.

    With `overlaps` it may start before the kernel that fills `inputs` ends.
    """
    ssm_state, journal, out = p.ssm_state, p.journal, p.out
    n, heads, dv = out.shape
    seqs, dk = len(p.state_indices), ssm_state.shape[3]
    block_k = next_power_of_2(dk)
    columns = min(launch.columns, block_k)
    block_v = next_power_of_2(dv)
    if norm is None:
        block_v = min(launch.rows, block_v)
    places = 1 if journal is None else journal.places
    _decode_kernel[(heads, seqs, cdiv(dv, block_v))](
        inputs.vectors,
        inputs.scalars,
        ssm_state,
        p.state_indices,
        None if journal is None else journal.steps,
        None if journal is None else journal.keys,
        None if journal is None else journal.errors,
        None if journal is None else journal.decays,
        None if norm is None else norm.gate,
        None if norm is None else norm.weight,
        out,
        0.0 if norm is None else norm.eps,
        ssm_state.stride(0),
        0 if norm is None else norm.gate.stride(0),
        out.stride(0),
        K_HEADS=inputs.vectors.shape[1],
        V_HEADS=heads,
        DK=dk,
        DV=dv,
        PLACES=places,
        TOKENS=n // seqs,
        JOURNAL=journal is not None,
        NORM=norm is not None,
        ROUND=ssm_state.dtype != torch.float32,
        PDL=overlaps,
        BK=block_k,
        BW=columns,
        BV=block_v,
        BM=inputs.vectors.shape[-1],
        BR=min(launch.inner, block_v),
        BS=next_power_of_2(places),
        STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
        launch_pdl=overlaps,
    )
