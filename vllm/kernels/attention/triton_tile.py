# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What attention of short and of long queries shares: a tile of keys, a step of online softmax.

Query rows of a tile are tokens by heads of one kv head: row `r` is token `r // GROUP`, head
`r % GROUP`. Softmax is kept in powers of two: `peak [rows]`, `total [rows]`, `acc [rows, BLOCK_D]`.
"""

import triton
import triton.language as tl

from vllm.kernels.attention import AttentionProblem, QueryRows

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
TOKENS = tl.constexpr(int(QueryRows.TOKENS))
WHOLE_BLOCK = tl.constexpr(int(QueryRows.WHOLE_BLOCK))


@triton.jit
def first_key(lowest, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the tile of the lowest query position starts to look."""
    if WINDOW > 0:
        return tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return lowest * 0


@triton.jit
def first_scores(sinks_ptr, head, counted, SINKS: tl.constexpr):
    """`peak, total [rows]` before any key: of the sinks of `head [rows]` if they are `counted`."""
    peak = tl.full(head.shape, float("-inf"), tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    if SINKS:
        peak = tl.where(counted, tl.load(sinks_ptr + head) * _LOG2_E, peak)
        total = tl.where(counted, total + 1.0, total)
    return peak, total


@triton.jit
def visible(n, position, anchor, seq_len, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Which keys `n [BLOCK_N]` the rows at `position [rows]` see; `anchor` is the first of the
    sequence's rows. ROWS: see `QueryRows`."""
    if ROWS == WHOLE_BLOCK:
        seen = (n[None, :] < seq_len) & (position[:, None] >= 0)
    else:
        seen = n[None, :] <= position[:, None]
    if WINDOW > 0:
        if ROWS == TOKENS:
            seen &= n[None, :] > position[:, None] - WINDOW
        else:
            seen &= n[None, :] > anchor - WINDOW
    return seen


@triton.jit
def keys_and_values(
    table, cache, n, limit, lowest, stride_block, dtype: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLOT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys and values `n [BLOCK_N]` of a sequence, each `[BLOCK_N, BLOCK_D]`, in `dtype`.

    `cache` points to the kv head. Without MASKED all are below `limit` and none slid out.
    """
    d = tl.arange(0, BLOCK_D)
    if MASKED:
        block = tl.load(table + n // BLOCK_SIZE, mask=n < limit, other=0)
    else:
        block = tl.load(table + n // BLOCK_SIZE)
    row = block.to(tl.int64) * stride_block + (n % BLOCK_SIZE) * SLOT
    k_ptr = cache + row[:, None] + d[None, :]
    v_ptr = k_ptr + BLOCK_SIZE * SLOT
    if MASKED or HEAD_DIM != BLOCK_D:
        live = n < limit
        if MASKED and WINDOW > 0:
            # Blocks that slid out may be another group's by now: not even 0 times a value.
            live &= n > lowest - WINDOW
        inside = live[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr, mask=inside, other=0.0)
        v = tl.load(v_ptr, mask=inside, other=0.0)
    else:
        k = tl.load(k_ptr)
        v = tl.load(v_ptr)
    return k.to(dtype), v.to(dtype)


@triton.jit
def fold(score, v, new_peak, peak, total, acc, MASKED: tl.constexpr):
    """The running softmax `peak, total, acc` after `score [rows, BLOCK_N]` (base 2) and `v`.

    `new_peak` is the larger of `peak` and the scores. With MASKED, rows may have seen no key yet.
    """
    shift = new_peak
    if MASKED:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.math.exp2(score - shift[:, None])
    fade = tl.math.exp2(peak - shift)
    total = total * fade + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new_peak, total, acc


def strides_of(p: AttentionProblem) -> tuple[int, ...]:
    """Of tokens and heads of the query, blocks, rows of the table, tokens and heads of `out` and of
    the gate (zeros without one), in elements: the order of both kernels' parameters."""
    return (
        *p.query.stride()[:2],
        p.kv_cache.stride(0),
        p.block_table.stride(0),
        *p.out.stride()[:2],
        *((0, 0) if p.gate is None else p.gate.stride()[:2]),
    )
