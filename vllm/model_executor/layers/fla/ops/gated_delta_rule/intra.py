# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What each chunk of the gated delta rule contributes without knowing the state.

Per chunk and value head (arXiv 2412.06464, section 3.3): gates and their running sum `G`,
`A = tril(k k^T exp(Gi - Gj) diag(beta), -1)`, `T = diag(beta) (I + A)^-1` and
`P = tril(q k^T exp(Gi - Gj))`; with them a chunk is `V' = T (v - exp(G) k S)` and
`O = exp(G) q S + P V'`. Keys and queries stay unnormalised in memory: inverse norms and the scale
are part of `P` and of the factors per token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.chunks import CHUNK
from vllm.kernels.triton.configs import device_configs
from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import (
    chunk_bounds,
    gate,
    inverse_norm,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.inverse import invert_unit_lower
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem


@dataclass(frozen=True)
class ChunkFactors:
    """`T, P [chunks, heads, 64, 64]` in the activation dtype; `rows [chunks, heads, 4, 64]` fp32:
    factors of `k S`, `q S` and `V'` (towards the chunk's end), and `exp(G)`; zero (`exp(G)`: its
    last value) past a sequence's end."""

    T: Tensor
    P: Tensor
    rows: Tensor


# Four programs of four warps per multiprocessor; the few values that spill cost less than waiting.
MAX_REGISTERS = 128
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _intra_chunk_kernel(
    q_ptr,
    k_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    chunk_ptr,
    T_ptr,
    P_ptr,
    rows_ptr,
    scale,
    stride_q,
    stride_k,
    stride_a,
    stride_b,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    GATES: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    SPLIT: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (value heads, chunks)."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, length = chunk_bounds(chunk_ptr, starts_ptr, chunk, BT)
    t, dk = tl.arange(0, BT), tl.arange(0, BK)
    valid = t < length
    a = tl.load(a_ptr + start * stride_a + t * stride_a + head, mask=valid, other=0.0)
    b = tl.load(b_ptr + start * stride_b + t * stride_b + head, mask=valid, other=0.0)
    g, beta = gate(a, b, A_log_ptr, dt_bias_ptr, head, GATES, BETA)
    beta = tl.where(valid, beta, 0.0)
    # Base-2 logarithms from here on: exp2 is one instruction.
    G = tl.cumsum(tl.where(valid, g * LOG2_E, 0.0), axis=0)
    G_last = tl.sum(tl.where(t == BT - 1, G, 0.0), axis=0)

    in_k = valid[:, None] & (dk < DK)[None, :]
    columns = (head // GROUP) * DK + dk[None, :]
    k = tl.load(k_ptr + start * stride_k + t[:, None] * stride_k + columns, mask=in_k, other=0.0)
    k_scale = tl.where(valid, inverse_norm(k, L2NORM), 0.0)
    place = chunk * HEADS + head
    rows = rows_ptr + place * 4 * BT + t
    tl.store(rows, k_scale * tl.exp2(G))
    tl.store(rows + 2 * BT, k_scale * tl.exp2(G_last - G))
    tl.store(rows + 3 * BT, tl.exp2(G))

    i, j = t[:, None], t[None, :]
    tile = place * BT * BT + i * BT + j
    decay = tl.exp2(tl.where(i > j, G[:, None] - G[None, :], float("-inf")))
    A = tl.dot(k, tl.trans(k), input_precision="tf32x3") * decay
    A = A * k_scale[:, None] * (beta * k_scale)[None, :]
    T = invert_unit_lower(A, SPLIT) * beta[:, None]
    tl.store(T_ptr + tile, T)

    # The queries come last, and the decay twice, so that the inverse has the registers.
    q = tl.load(q_ptr + start * stride_q + t[:, None] * stride_q + columns, mask=in_k, other=0.0)
    q_scale = tl.where(valid, inverse_norm(q, L2NORM) * scale, 0.0)
    tl.store(rows + BT, q_scale * tl.exp2(G))
    decay = tl.exp2(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
    P = tl.dot(q, tl.trans(k), input_precision="tf32x3") * decay
    tl.store(P_ptr + tile, P * q_scale[:, None] * k_scale[None, :])


def empty_factors(p: ChunkedProblem) -> ChunkFactors:
    """Memory for the factors of every chunk of the batch."""
    heads = p.v.shape[1]
    matrices = (p.num_chunks, heads, CHUNK, CHUNK)
    return ChunkFactors(
        T=p.v.new_empty(matrices),
        P=p.v.new_empty(matrices),
        rows=torch.empty(p.num_chunks, heads, 4, CHUNK, dtype=torch.float32, device=p.v.device),
    )


def intra_chunk(p: ChunkedProblem) -> ChunkFactors:
    """Factors of every chunk of the batch."""
    heads = p.v.shape[1]
    factors = empty_factors(p)
    configs = device_configs(p.v.device)
    _intra_chunk_kernel[(heads, p.num_chunks)](
        p.q,
        p.k,
        p.a,
        p.b,
        p.A_log,
        p.dt_bias,
        p.query_start_loc,
        p.chunk_indices,
        factors.T,
        factors.P,
        factors.rows,
        p.scale,
        p.q.stride(0),
        p.k.stride(0),
        p.a.stride(0),
        p.b.stride(0),
        HEADS=heads,
        GROUP=p.group,
        DK=p.head_k_dim,
        GATES=p.A_log is not None,
        BETA=p.beta_scale,
        L2NORM=p.l2norm,
        SPLIT=p.v.dtype == torch.bfloat16,
        BK=p.block_k,
        BT=CHUNK,
        num_warps=configs.gdn_fp32_warps if p.wide else configs.gdn_intra.num_warps,
        maxnreg=None if p.wide else MAX_REGISTERS,
    )
    return factors
