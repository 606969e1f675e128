# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The sequential part of the chunked gated delta rule: states across chunks.

Per sequence, value head and dv tile, chunk after chunk with `S [dk, dv]` in fp32 registers:
`V' = U - W S`, then `S = exp(G_C) S + k^T (exp(G_C - G) V')`. The state is read from and written
to the pool here, by state index.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.configs import device_configs, pick
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import CHUNK, ChunkedProblem


@triton.jit
def _chunk_tile(u_ptr, g_ptr, k_scale_ptr, start, end, head, v, in_v, HEADS, DV, BT: tl.constexpr):
    """`U`, `G`, key scales of the chunk at `start`, and its last `G`; zeros past the end."""
    t = tl.arange(0, BT)
    valid = start + t < end
    row = start * HEADS + t * HEADS + head
    u = tl.load(
        u_ptr + row[:, None] * DV + v[None, :], mask=valid[:, None] & in_v[None, :], other=0.0
    )
    g = tl.load(g_ptr + row, mask=valid, other=0.0)
    k_scale = tl.load(k_scale_ptr + row, mask=valid, other=0.0)
    last = tl.minimum(start + BT, end) - 1
    return u, g, k_scale, tl.load(g_ptr + last * HEADS + head, mask=start < end, other=0.0)


@triton.jit
def _state_pass_kernel(
    k_ptr,
    w_ptr,
    u_ptr,
    g_ptr,
    k_scale_ptr,
    h_ptr,
    state_ptr,
    index_ptr,
    carried_ptr,
    starts_ptr,
    offsets_ptr,
    stride_k,
    stride_block,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (dv tiles, value heads, sequences). `V'` replaces `U`; `h` gets each chunk's `S`."""
    head, seq = tl.program_id(1), tl.program_id(2)
    index = tl.load(index_ptr + seq).to(tl.int64)
    start = tl.load(starts_ptr + seq).to(tl.int64)
    end = tl.load(starts_ptr + seq + 1).to(tl.int64)
    if (index < 0) | (start == end):
        return
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    dk, t = tl.arange(0, BK), tl.arange(0, BT)
    in_v = v < DV
    in_state = (dk < DK)[:, None] & in_v[None, :]
    stored = state_ptr + index * stride_block + head * DV * DK + v[None, :] * DK + dk[:, None]
    S = tl.zeros((BK, BV), tl.float32)
    if tl.load(carried_ptr + seq).to(tl.int1):
        S += tl.load(stored, mask=in_state, other=0.0).to(tl.float32)
    h = h_ptr + (tl.load(offsets_ptr + seq).to(tl.int64) * HEADS + head) * DK * DV
    h += dk[:, None] * DV + v[None, :]
    dtype: tl.constexpr = u_ptr.dtype.element_ty

    u, g, k_scale, g_last = _chunk_tile(
        u_ptr, g_ptr, k_scale_ptr, start, end, head, v, in_v, HEADS, DV, BT
    )
    for _ in range(tl.cdiv((end - start).to(tl.int32), BT)):
        valid = start + t < end
        in_k = valid[:, None] & (dk < DK)[None, :]
        row = start * HEADS + t * HEADS + head
        w = tl.load(w_ptr + row[:, None] * DK + dk[None, :], mask=in_k, other=0.0)
        k_row = k_ptr + start * stride_k + (head // GROUP) * DK
        k = tl.load(k_row + t[:, None] * stride_k + dk[None, :], mask=in_k, other=0.0)
        next_u, next_g, next_scale, next_last = _chunk_tile(
            u_ptr, g_ptr, k_scale_ptr, start + BT, end, head, v, in_v, HEADS, DV, BT
        )
        rounded = S.to(dtype)
        tl.store(h, rounded, mask=in_state)
        v_new = u.to(tl.float32) - tl.dot(w, rounded, input_precision="tf32x3")
        tl.store(u_ptr + row[:, None] * DV + v[None, :], v_new, mask=valid[:, None] & in_v[None, :])
        v_new = (v_new * (k_scale * tl.exp(g_last - g))[:, None]).to(dtype)
        S = tl.dot(tl.trans(k), v_new, S * tl.exp(g_last), input_precision="tf32x3")
        u, g, k_scale, g_last = next_u, next_g, next_scale, next_last
        start += BT
        h += HEADS * DK * DV
    tl.store(stored, S, mask=in_state)


def state_pass(p: ChunkedProblem, w: Tensor, u: Tensor, g: Tensor, k_scale: Tensor) -> Tensor:
    """States at chunk starts `h [chunks, heads, dk, dv]`; turns `u` into `V'` and updates the pool.

    Halved dv tiles when few sequences would leave multiprocessors idle.
    """
    _, heads, dv = p.v.shape
    configs = device_configs(p.v.device)
    table = configs.gdn_state_fp32 if p.wide else configs.gdn_state
    tile = pick(table, p.head_k_dim)
    block_v = min(tile.columns, p.block_v)
    if p.num_seqs * heads * triton.cdiv(dv, block_v) < configs.multiprocessors:
        block_v = max(32, block_v // 2)
    h = p.v.new_empty(p.num_chunks, heads, p.head_k_dim, dv)
    _state_pass_kernel[(triton.cdiv(dv, block_v), heads, p.num_seqs)](
        p.k,
        w,
        u,
        g,
        k_scale,
        h,
        p.ssm_state,
        p.state_indices,
        p.has_initial_state,
        p.query_start_loc,
        p.chunk_offsets,
        p.k.stride(0),
        p.ssm_state.stride(0),
        HEADS=heads,
        GROUP=p.group,
        DK=p.head_k_dim,
        DV=dv,
        BK=p.block_k,
        BV=block_v,
        BT=CHUNK,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return h
