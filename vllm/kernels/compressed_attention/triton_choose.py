# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The choice of entries on GPUs: a kernel ranks them, torch takes the highest ranks.

A rank is an integer: the score's bits, in the order of scores, above the entry's number turned
around. So no two are equal, and equal scores go to the earlier entry.
"""

import torch
import triton
import triton.language as tl

from vllm.kernels.compressed_attention import ChooseProblem
from vllm.kernels.compressed_attention.triton_rows import load_rows
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import cdiv, next_power_of_2

_ENTRIES = 64
#: the least that tensor cores take
_LEAST = 16
#: ranks that exist at once, about
_PIECE = 1 << 24
_LAST = (1 << 31) - 1
#: of an entry that a token does not see
_NONE = -(1 << 63)


_VARIES = ["table_ptr", "positions_ptr", "first", "query_len", "most", "columns", "stride_table"]


@triton.jit(do_not_specialize=_VARIES)
def _rank_kernel(
    query_ptr,
    weights_ptr,
    keys_ptr,
    table_ptr,
    positions_ptr,
    ranks_ptr,
    first,
    query_len,
    most,
    columns,
    stride_q_token,
    stride_q_head,
    stride_weights,
    stride_block,
    stride_table,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (tokens of the piece, tiles of entries). `ranks [tokens of the piece, most]` int64."""
    token = first + tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    visible = (tl.load(positions_ptr + token) + 1) // RATIO
    seen = entry < visible
    ranks = tl.full((BLOCK_E,), -9223372036854775808, tl.int64)
    if tl.program_id(1) * BLOCK_E < visible:
        h = tl.arange(0, BLOCK_H)
        d = tl.arange(0, BLOCK_D)
        heads = h < HEADS
        query = tl.load(
            query_ptr + token * stride_q_token + h[:, None] * stride_q_head + d[None, :],
            mask=heads[:, None] & (d < WIDTH)[None, :],
            other=0.0,
        )
        table = table_ptr + token // query_len * stride_table
        keys, _ = load_rows(
            keys_ptr, table, entry, seen, columns, stride_block, BLOCK_SIZE, WIDTH, BLOCK_D
        )
        products = tl.dot(query, tl.trans(keys), input_precision="ieee")
        weights = tl.load(weights_ptr + token * stride_weights + h, mask=heads, other=0.0)
        score = tl.sum(tl.maximum(products, 0.0) * weights[:, None], axis=0)
        # 0 and -0 are equal.
        bits = (score + 0.0).to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        turned = (0x7FFFFFFF - entry).to(tl.int64)
        ranks = tl.where(seen, ordered * 4294967296 + turned, ranks)
    tl.store(ranks_ptr + tl.program_id(0).to(tl.int64) * most + entry, ranks, mask=entry < most)


_rank = Launcher(_rank_kernel)


def choose_entries(p: ChooseProblem) -> None:
    """See `naive.choose_entries`."""
    tokens, heads, width = p.query.shape
    num_seqs, most, topk = len(p.keys.block_table), p.keys.num_rows, p.chosen.shape[1]
    if tokens == 0:
        return
    size = max(1, _PIECE // most)
    ranks = torch.empty(min(size, tokens), most, dtype=torch.int64, device=p.query.device)
    kept = min(topk, most)
    p.chosen[:, kept:].fill_(-1)
    for first in range(0, tokens, size):
        count = min(size, tokens - first)
        _rank[(count, cdiv(most, _ENTRIES), 1)](
            p.query,
            p.head_weights,
            p.keys.cache,
            p.keys.block_table,
            p.positions,
            ranks,
            first,
            tokens // num_seqs,
            most,
            p.keys.block_table.shape[1],
            *p.query.stride()[:2],
            p.head_weights.stride(0),
            p.keys.cache.stride(0),
            p.keys.block_table.stride(0),
            RATIO=p.ratio,
            HEADS=heads,
            WIDTH=width,
            BLOCK_SIZE=p.keys.cache.shape[1],
            BLOCK_H=max(_LEAST, next_power_of_2(heads)),
            BLOCK_E=_ENTRIES,
            BLOCK_D=max(_LEAST, next_power_of_2(width)),
            num_warps=4,
        )
        best = ranks[:count].topk(kept, dim=-1).values
        entries = (_LAST - (best & _LAST)).where(best != _NONE, -1)
        p.chosen[first : first + count, :kept].copy_(entries)
