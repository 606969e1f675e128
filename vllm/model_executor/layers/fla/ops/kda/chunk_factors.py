# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What each chunk of Kimi delta attention contributes without knowing the state.

Per chunk and head, with the running sum `G [64, dk]` of the log decays: `A = tril(sum_c k_ic k_jc
exp(G_ic - G_jc) beta_j, -1)`, `T = diag(beta) (I + A)^-1`, `P = tril(sum_c q_ic k_jc exp(G_ic -
G_jc))`. A chunk is then `V' = T (v - (k exp(G)) S)`, `O = (q exp(G)) S + P V'` and `S = exp(G_C) S
+ (k exp(G_C - G))^T V'`, C its last token.

The decays are part of the products' operands: `exp(G_i - G_j) = exp(G_i - R) exp(R - G_j)` with a
reference `R` between the two tokens, so that neither factor exceeds one, however strong decays are.
Halves of 32 and quarters of 16 tokens meet at their common border. Pairs within 16 tokens have
their middle as the reference, on one side of which factors are inverted: eight tokens' decays may
be as little as 2^-120 together. In chunks with stronger ones halves meet down to four tokens, whose
pairs are taken one by one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.chunks import CHUNK
from vllm.model_executor.layers.fla.ops.gated_delta_rule.gates import chunk_bounds
from vllm.model_executor.layers.fla.ops.gated_delta_rule.inverse import invert_unit_lower
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill


@dataclass(frozen=True)
class ChunkFactors:
    """`queries, keys, ends [chunks, heads, 64, dk]`: `q exp(G)`, `k exp(G)` and `k exp(G_C - G)`;
    `T, P [chunks, heads, 64, 64]`; all in the activation dtype and zero past a sequence's end.
    `decays [chunks, heads, 1, dk]` fp32: `exp(G_C)`."""

    queries: Tensor
    keys: Tensor
    ends: Tensor
    T: Tensor
    P: Tensor
    decays: Tensor


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
#: the most that eight tokens' base-2 log decays may come to, positive, for a reference beside them
_STRONGEST: tl.constexpr = tl.constexpr(120.0)
#: a base-2 log decay of which nothing is left in fp32
_NOTHING: tl.constexpr = tl.constexpr(-160.0)


@triton.jit
def _base2_softplus(x):
    """`log2(1 + exp(x))`, with relative accuracy where it is tiny: slow decays live there."""
    e = tl.exp2(tl.abs(x) * -LOG2_E)
    series = e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25))) * LOG2_E
    return tl.maximum(x, 0.0) * LOG2_E + tl.where(e < 0.03125, series, tl.log2(1.0 + e))


@triton.jit
def _operand(x, DTYPE: tl.constexpr, BK: tl.constexpr):
    """`[4, 16, BK]` by place in a block, block and channel as `[64, BK]` by token and channel."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), (64, BK)).to(DTYPE)


@triton.jit
def _borders(upto, SIZE: tl.constexpr, BK: tl.constexpr):
    """`[16, BK]`: `upto` in the middle of every `SIZE` blocks, for each of these."""
    groups = tl.reshape(upto, (16 // SIZE, SIZE, BK))
    middle = tl.arange(0, SIZE)[None, :, None] == SIZE // 2 - 1
    border = tl.sum(tl.where(middle, groups, 0.0), axis=1)
    return tl.reshape(tl.broadcast_to(border[:, None, :], (16 // SIZE, SIZE, BK)), (16, BK))


@triton.jit
def _joined(q, k, forward, backward, before, upto, SIZE: tl.constexpr, OPERAND: tl.constexpr,
            BK: tl.constexpr):  # fmt: skip
    """Products of tokens in the second half of `SIZE` blocks with those of the first, `[64, 64]` of
    keys and of queries; what is elsewhere in them is wrong."""
    late = (tl.arange(0, 16) % SIZE >= SIZE // 2)[:, None]
    if SIZE == 2:
        factor = tl.where(late[None, :, :], forward, backward)
    else:
        border = _borders(upto, SIZE, BK)
        shift = tl.exp2(tl.where(late, before - border, border - upto))
        factor = tl.where(late[None, :, :], forward, backward) * shift[None, :, :]
    keys = _operand(k * factor, OPERAND, BK)
    A = tl.dot(keys, tl.trans(keys), input_precision="tf32x3")
    queries = _operand(q * factor, OPERAND, BK)
    return A, tl.dot(queries, tl.trans(keys), input_precision="tf32x3")


@triton.jit
def _pairs(rows, k, G):
    """`sum_c rows_ic k_jc exp2(G_ic - G_jc)` of every two tokens of a block, `i >= j`, as
    `[64, 64]`, pair by pair."""
    place = tl.arange(0, 4)[:, None, None]
    found = tl.zeros((4, 16, 4), tl.float32)
    for j in tl.range(4):
        k_j = tl.sum(tl.where(place == j, k, 0.0), axis=0)[None, :, :]
        G_j = tl.sum(tl.where(place == j, G, 0.0), axis=0)[None, :, :]
        terms = rows * k_j * tl.exp2(tl.minimum(G - G_j, 0.0))
        column = tl.arange(0, 4)[None, None, :]
        found += tl.where(column == j, tl.sum(terms, axis=2)[:, :, None], 0.0)
    b = tl.arange(0, 16)
    same = (b[:, None] == b[None, :])[:, None, :, None]
    found = tl.permute(found, (1, 0, 2))[:, :, None, :]
    return tl.reshape(tl.where(same, found, 0.0), (64, 64))


@triton.jit
def _factors_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    chunk_ptr,
    queries_ptr,
    keys_ptr,
    ends_ptr,
    T_ptr,
    P_ptr,
    decays_ptr,
    scale,
    stride_qkv,
    stride_a,
    stride_b,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (heads, chunks). Tokens are `[place in block, block]`, four by sixteen: a thread has all
    places of its blocks, so that sums within a block stay within it."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, length = chunk_bounds(chunk_ptr, starts_ptr, chunk, BT)
    t = tl.arange(0, 4)[:, None, None] + 4 * tl.arange(0, 16)[None, :, None]
    dk = tl.arange(0, BK)
    in_k = (dk < DK)[None, None, :]
    inside = (t < length) & in_k
    channel = head * DK + dk[None, None, :]
    a = tl.load(a_ptr + start * stride_a + t * stride_a + channel, mask=inside, other=0.0)
    row = qkv_ptr + start * stride_qkv + t * stride_qkv + channel
    k = tl.load(row + HEADS * DK, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    A_log = tl.load(A_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head * DK + dk, mask=dk < DK, other=0.0).to(tl.float32)
    g = -tl.exp(A_log) * _base2_softplus(a.to(tl.float32) + dt_bias[None, None, :])
    g = tl.where(inside, tl.maximum(g, _NOTHING), 0.0)
    k *= tl.rsqrt(tl.sum(k * k, axis=2) + 1e-6)[:, :, None]
    q *= tl.rsqrt(tl.sum(q * q, axis=2) + 1e-6)[:, :, None] * scale

    # Base-2 logarithms. Within a block: forward from its start, backward from its end.
    G = tl.cumsum(g, axis=0)
    sums = tl.sum(g, axis=0)
    upto = tl.cumsum(sums, axis=0)
    before = upto - sums
    whole = tl.sum(sums, axis=0)
    forward = tl.exp2(G)
    backward = tl.exp2(tl.minimum(sums[None, :, :] - G, 0.0))
    place = chunk * HEADS + head
    tl.store(decays_ptr + place * DK + dk, tl.exp2(whole), mask=dk < DK)
    tile = place * BT * DK + t * DK + dk[None, None, :]
    from_start = forward * tl.exp2(before)[None, :, :]
    tl.store(keys_ptr + tile, k * from_start, mask=in_k & (t < BT))
    tl.store(queries_ptr + tile, q * from_start, mask=in_k & (t < BT))
    to_end = backward * tl.exp2(tl.minimum(whole[None, :] - upto, 0.0))[None, :, :]
    tl.store(ends_ptr + tile, k * to_end, mask=in_k & (t < BT))

    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    A, P = _joined(q, k, forward, backward, before, upto, 16, OPERAND, BK)
    nearer_A, nearer_P = _joined(q, k, forward, backward, before, upto, 8, OPERAND, BK)
    A = tl.where(i // 32 == j // 32, nearer_A, A)
    P = tl.where(i // 32 == j // 32, nearer_P, P)
    middle = _borders(upto, 4, BK)
    after = before - middle
    within = i // 16 == j // 16
    if tl.max(tl.max(tl.maximum(after, middle - upto), axis=1), axis=0) <= _STRONGEST:
        keys = _operand(k * (backward * tl.exp2(middle - upto)[None, :, :]), OPERAND, BK)
        factor = forward * tl.exp2(after)[None, :, :]
        rows = _operand(k * factor, OPERAND, BK)
        A = tl.where(within, tl.dot(rows, tl.trans(keys), input_precision="tf32x3"), A)
        rows = _operand(q * factor, OPERAND, BK)
        P = tl.where(within, tl.dot(rows, tl.trans(keys), input_precision="tf32x3"), P)
    else:
        nearer_A, nearer_P = _joined(q, k, forward, backward, before, upto, 4, OPERAND, BK)
        A = tl.where(within, nearer_A, A)
        P = tl.where(within, nearer_P, P)
        nearer_A, nearer_P = _joined(q, k, forward, backward, before, upto, 2, OPERAND, BK)
        within = i // 8 == j // 8
        A = tl.where(within, nearer_A, A)
        P = tl.where(within, nearer_P, P)
        within = i // 4 == j // 4
        A = tl.where(within, _pairs(k, k, G), A)
        P = tl.where(within, _pairs(q, k, G), P)

    square = place * BT * BT + i * BT + j
    tl.store(P_ptr + square, tl.where(i >= j, P, 0.0))
    row_in, column_in = tl.arange(0, BT) < length, j < length
    b = b_ptr + start * stride_b + head
    beta_j = tl.sigmoid(tl.load(b + j * stride_b, mask=column_in, other=0.0).to(tl.float32))
    A = tl.where((i > j) & column_in, A * beta_j, 0.0)
    T = invert_unit_lower(A, SPLIT)
    beta_i = tl.sigmoid(tl.load(b + i * stride_b, mask=row_in[:, None], other=0.0).to(tl.float32))
    tl.store(T_ptr + square, T * tl.where(row_in[:, None], beta_i, 0.0))


def empty_factors(p: KdaPrefill) -> ChunkFactors:
    """Memory for the factors of every chunk of the batch."""
    heads, _, dk, _ = p.heads
    chunks = len(p.chunk_indices)
    return ChunkFactors(
        queries=p.qkv.new_empty(chunks, heads, CHUNK, dk),
        keys=p.qkv.new_empty(chunks, heads, CHUNK, dk),
        ends=p.qkv.new_empty(chunks, heads, CHUNK, dk),
        T=p.qkv.new_empty(chunks, heads, CHUNK, CHUNK),
        P=p.qkv.new_empty(chunks, heads, CHUNK, CHUNK),
        decays=torch.empty(chunks, heads, 1, dk, dtype=torch.float32, device=p.qkv.device),
    )


def chunk_factors(p: KdaPrefill) -> ChunkFactors:
    """Factors of every chunk of the batch."""
    heads, _, dk, _ = p.heads
    gates, made = p.gates, empty_factors(p)
    half = p.qkv.dtype == torch.bfloat16
    _factors_kernel[(heads, len(p.chunk_indices))](
        p.qkv,
        gates.a,
        gates.b,
        gates.A_log,
        gates.dt_bias,
        p.query_start_loc,
        p.chunk_indices,
        made.queries,
        made.keys,
        made.ends,
        made.T,
        made.P,
        made.decays,
        dk**-0.5,
        p.qkv.stride(0),
        gates.a.stride(0),
        gates.b.stride(0),
        HEADS=heads,
        DK=dk,
        BK=p.block_k,
        BT=CHUNK,
        OPERAND=tl.bfloat16 if half else tl.float32,
        SPLIT=half,
        num_warps=8,
    )
    return made
