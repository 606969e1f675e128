# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The experts' matrix products: a program per (block of rows, tile of outputs).

Weights are the left operand, so blocks may be as narrow as 16 rows: at few tokens a product is
bound by the bytes of the experts that are hit. Blocks that are not used leave at once.

Float8 operands (SCALED) have scales: per row of activations and per row of weights, applied to the
whole sum, or with GROUP_K > 0 also per GROUP_K channels, applied to each group's. Hopper's tensor
cores keep some 14 bits of such a sum, so they add no more than SUMMED channels (DeepSeek-V3, arXiv
2412.19437, section 3.3.2); those sums are added in fp32.
"""

import triton
import triton.language as tl

from vllm.kernels.activation.triton import clamped_gate
from vllm.kernels.triton.dependent_launch import await_previous, start_next
from vllm.kernels.triton.launcher import Launcher

SUMMED = tl.constexpr(128)


@triton.jit
def _block_rows(
    pairs_ptr, block_experts_ptr, ends_ptr, block, num_pairs,
    EXPERTS: tl.constexpr, SORTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block's expert, its places, their pairs and which are used. Not SORTED: every pair is a
    block of its own, and `block_experts` is what the router chose."""
    expert = tl.load(block_experts_ptr + block)
    row = tl.arange(0, ROWS)
    place = block * ROWS + row
    if SORTED:
        used = place < tl.load(ends_ptr + tl.minimum(tl.maximum(expert, 0), EXPERTS - 1))
        pair = tl.load(pairs_ptr + place, mask=used, other=-1)
        used = used & (pair >= 0) & (pair < num_pairs)
        pair = tl.where(used, pair, 0)
    else:
        used = row == 0
        pair = tl.where(used, block, 0)
    return expert, place, pair, used


@triton.jit
def _load(at, exists, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of an operand; `k`, broadcastable to it, are its columns or rows along the sum."""
    if K % BLOCK_K == 0:
        return tl.load(at, mask=exists, other=0.0)
    return tl.load(at, mask=exists & (k < K), other=0.0)


@triton.jit
def _scale_at(scale_ptr, expert, rows: tl.constexpr, K: tl.constexpr, GROUP_K: tl.constexpr):
    """Where an expert's scales of weights begin: `[rows]`, or `[groups, rows]` with GROUP_K."""
    groups: tl.constexpr = (K + GROUP_K - 1) // GROUP_K if GROUP_K > 0 else 1
    return scale_ptr + expert.to(tl.int64) * (groups * rows)


@triton.jit(do_not_specialize=["num_pairs", "stride_xs_group"])
def _gate_up_kernel(
    x_ptr, xs_ptr, weight_ptr, ws_ptr, bias_ptr, out_ptr,
    pairs_ptr, block_experts_ptr, ends_ptr, num_pairs,
    stride_x, stride_xs_row, stride_xs_group,
    K: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    BIAS: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    OFFSET: tl.constexpr, SCALED: tl.constexpr, GROUP_K: tl.constexpr,
    SORTED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`silu(gate(x)) * up(x)`, its clamped form, or not GATED `relu(up(x))^2`, written at a block's
    places: `[places, N]`."""
    start_next(PDL)
    await_previous(PDL)
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // tiles
    expert, place, pair, used = _block_rows(
        pairs_ptr, block_experts_ptr, ends_ptr, block, num_pairs, EXPERTS, SORTED, ROWS
    )
    if (expert < 0) | (expert >= EXPERTS):
        return
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK_K)
    exists = (column < N)[:, None]
    token = (pair // SLOTS).to(tl.int64)
    x_at = x_ptr + token[None, :] * stride_x + kk[:, None]
    rows: tl.constexpr = 2 * N if GATED else N
    up_at = weight_ptr + expert.to(tl.int64) * (rows * K) + column[:, None] * K + kk[None, :]
    if SCALED:
        xs_at = xs_ptr + token[None, :] * stride_xs_row
        ws_at = _scale_at(ws_ptr, expert, rows, K, GROUP_K) + column[:, None]
    ALONE: tl.constexpr = SUMMED if SCALED else None
    gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + kk
        x = _load(x_at + start, used[None, :], k[:, None], K, BLOCK_K)
        w = _load(up_at + start, exists, k[None, :], K, BLOCK_K)
        if GROUP_K > 0:
            group = start // GROUP_K
            xs = tl.load(xs_at + group * stride_xs_group)
            ws = tl.load(ws_at + group * rows, mask=exists, other=0.0)
        if GATED:
            # The gate's rows come first.
            if GROUP_K > 0:
                gate += tl.dot(w, x) * (ws * xs)
                ws = tl.load(ws_at + group * rows + N, mask=exists, other=0.0)
            else:
                gate = tl.dot(w, x, gate, input_precision="ieee", max_num_imprecise_acc=ALONE)
            w = _load(up_at + N * K + start, exists, k[None, :], K, BLOCK_K)
        if GROUP_K > 0:
            up += tl.dot(w, x) * (ws * xs)
        else:
            up = tl.dot(w, x, up, input_precision="ieee", max_num_imprecise_acc=ALONE)
    if SCALED and GROUP_K == 0:
        xs = tl.load(xs_at)
        if GATED:
            gate *= tl.load(ws_at, mask=exists, other=0.0) * xs
            ws_at += N
        up *= tl.load(ws_at, mask=exists, other=0.0) * xs
    if BIAS:
        bias_at = bias_ptr + expert.to(tl.int64) * (2 * N) + column[:, None]
        gate += tl.load(bias_at, mask=exists, other=0.0).to(tl.float32)
        up += tl.load(bias_at + N, mask=exists, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    active = up.to(dtype).to(tl.float32)
    if GATED:
        gate = gate.to(dtype).to(tl.float32)
        if CLAMPED:
            active = clamped_gate(gate, active, ALPHA, LIMIT, OFFSET)
        else:
            active = gate * tl.sigmoid(gate) * active
    else:
        active = tl.where(active < 0, 0.0, active)
        active = active * active
    out_at = out_ptr + place[None, :].to(tl.int64) * N + column[:, None]
    tl.store(out_at, active.to(dtype), mask=exists & used[None, :])


@triton.jit(do_not_specialize=["num_pairs", "stride_xs_group"])
def _down_kernel(
    x_ptr, xs_ptr, weight_ptr, ws_ptr, bias_ptr, out_ptr,
    pairs_ptr, block_experts_ptr, ends_ptr, num_pairs, stride_xs_row, stride_xs_group,
    K: tl.constexpr, N: tl.constexpr, EXPERTS: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, GROUP_K: tl.constexpr,
    SORTED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The product of a block's places `[places, K]`, written at their pairs: `[pairs, N]`."""
    start_next(PDL)
    await_previous(PDL)
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // tiles
    expert, place, pair, used = _block_rows(
        pairs_ptr, block_experts_ptr, ends_ptr, block, num_pairs, EXPERTS, SORTED, ROWS
    )
    if (expert < 0) | (expert >= EXPERTS):
        return
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK_K)
    exists = (column < N)[:, None]
    x_at = x_ptr + place[None, :].to(tl.int64) * K + kk[:, None]
    w_at = weight_ptr + expert.to(tl.int64) * (N * K) + column[:, None] * K + kk[None, :]
    if SCALED:
        xs_at = xs_ptr + place[None, :].to(tl.int64) * stride_xs_row
        ws_at = _scale_at(ws_ptr, expert, N, K, GROUP_K) + column[:, None]
    ALONE: tl.constexpr = SUMMED if SCALED else None
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + kk
        x = _load(x_at + start, used[None, :], k[:, None], K, BLOCK_K)
        w = _load(w_at + start, exists, k[None, :], K, BLOCK_K)
        if GROUP_K > 0:
            group = start // GROUP_K
            xs = tl.load(xs_at + group * stride_xs_group)
            acc += tl.dot(w, x) * (tl.load(ws_at + group * N, mask=exists, other=0.0) * xs)
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee", max_num_imprecise_acc=ALONE)
    if SCALED and GROUP_K == 0:
        acc *= tl.load(ws_at, mask=exists, other=0.0) * tl.load(xs_at)
    if BIAS:
        bias_at = bias_ptr + expert.to(tl.int64) * N + column[:, None]
        acc += tl.load(bias_at, mask=exists, other=0.0).to(tl.float32)
    out_at = out_ptr + pair[None, :].to(tl.int64) * N + column[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=exists & used[None, :])


gate_up = Launcher(_gate_up_kernel)
down = Launcher(_down_kernel)
