# SPDX-License-Identifier: Apache-2.0
"""Attention of short queries in CUDA C++ for Hopper: `csrc/cuda/hopper/decode_attention.cu`.

It takes bfloat16 queries of heads of 128 or 256 and up to `MAX_ROWS` query rows (tokens of a
sequence times query heads of a kv head), over a float8 cache or, where every share of the keys has
a multiprocessor of its own, over a bfloat16 one: otherwise Triton is as fast or faster.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from vllm.kernels import fp8
from vllm.kernels.cuda_library import choose_cuda_ops
from vllm.utils.math_utils import cdiv

HEAD_DIMS = (128, 256)
MAX_ROWS = 8
TILE_KEYS = 16
#: shares of a sequence that can be joined
MAX_SHARES = 32
#: sequences whose numbers of shares fit into shared memory beside the keys
MAX_SEQUENCES = 2048
#: keys that are worth a share where all sequences' shares run at once, and where they take turns
FEW_SHARE_KEYS = 256
MANY_SHARE_KEYS = 1024
#: numbers that shares on their way to be joined may take
SHARED_NUMBERS = 4 * 2**20
LOG2_E = 1.4426950408889634
WHAT = "attention of short queries"


class ShortAttentionOp(Protocol):
    """`Kernels.paged_attention` of what `takes_attention` says, `scale` times `k_scale`."""

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        *,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        v_scale: float,
        sliding_window: int | None,
        out: Tensor,
        gate: Tensor | None,
    ) -> None: ...


def takes_attention(
    query: Tensor,
    kv_cache: Tensor,
    num_seqs: int,
    max_query_len: int,
    out: Tensor,
    gate: Tensor | None,
    chip: int,
) -> bool:
    """Whether the op takes these on a GPU of `chip` multiprocessors; the other arguments are those
    of `Kernels.paged_attention`."""
    _, num_heads, head_dim = query.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    return (
        query.dtype == torch.bfloat16
        and (kv_cache.dtype is fp8.FP8 or _fits_at_once(num_seqs, num_kv_heads, kv_cache, chip))
        and head_dim in HEAD_DIMS
        and num_heads // num_kv_heads * max_query_len <= MAX_ROWS
        and block_size % TILE_KEYS == 0
        and num_seqs <= MAX_SEQUENCES
        and _at_16_bytes(kv_cache)
        and all(_at_8_bytes(rows) for rows in (query, out, gate) if rows is not None)
    )


def _fits_at_once(num_seqs: int, num_kv_heads: int, kv_cache: Tensor, chip: int) -> bool:
    """Whether two shares of every sequence do, and the cache is bfloat16."""
    return kv_cache.dtype == torch.bfloat16 and 2 * num_seqs * num_kv_heads <= chip


def _at_8_bytes(rows: Tensor) -> bool:
    """Whether each head's elements are adjacent and start at a multiple of 8 bytes."""
    token, head, element = rows.stride()
    return element == 1 and token % 4 == head % 4 == rows.storage_offset() % 4 == 0


def _at_16_bytes(kv_cache: Tensor) -> bool:
    step = 16 // kv_cache.element_size()
    return kv_cache.stride(0) % step == kv_cache.storage_offset() % step == 0


def num_shares(
    num_seqs: int, num_kv_heads: int, max_seq_len: int, row_numbers: int, chip: int
) -> tuple[int, int]:
    """The most shares of a sequence, and the keys that are worth one.

    Those that fill `chip` multiprocessors once, if a sequence has two or more; else they take turns
    and even out the sequences' lengths. `row_numbers` are those of a sequence's longest output.
    From host integers only, so neither other sequences' lengths nor graph replay change a bit.
    """
    at_once = chip // (num_seqs * num_kv_heads)
    if at_once > 1:
        return min(at_once, MAX_SHARES, cdiv(max_seq_len, FEW_SHARE_KEYS)), FEW_SHARE_KEYS
    room = max(1, SHARED_NUMBERS // (num_seqs * row_numbers))
    return min(room, MAX_SHARES, cdiv(max_seq_len, MANY_SHARE_KEYS)), MANY_SHARE_KEYS


@cache
def arrivals(device: torch.device, num_kv_heads: int) -> Tensor:
    """`[MAX_SEQUENCES * num_kv_heads]` int32, zero between launches; a stream's share it."""
    return torch.zeros(MAX_SEQUENCES * num_kv_heads, dtype=torch.int32, device=device)


def hopper_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    v_scale: float,
    sliding_window: int | None,
    out: Tensor,
    gate: Tensor | None,
) -> None:
    """See `ShortAttentionOp`.

    In a graph it may start before the kernels ahead of it end, and reads keys and values of earlier
    tokens meanwhile: no kernel of the graph but the step's cache write may write them.
    """
    tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_seqs = kv_cache.shape[3], len(seq_lens)
    row_numbers = max_query_len * num_heads * head_dim
    chip = _multiprocessors(query.device)
    splits, split_keys = num_shares(num_seqs, num_kv_heads, max_seq_len, row_numbers, chip)
    part = lse = arrived = None
    if splits > 1:
        shape = (tokens, num_heads, splits)
        part = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
        arrived = arrivals(query.device, num_kv_heads)
    torch.ops.vllm_cuda.decode_attention.default(
        query,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        gate,
        part,
        lse,
        arrived,
        max_query_len,
        splits,
        split_keys,
        sliding_window or 0,
        scale * LOG2_E,
        v_scale,
        torch.cuda.is_current_stream_capturing(),
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def find_hopper_attention(capability: tuple[int, int]) -> ShortAttentionOp | None:
    """The op for a device of this compute capability, or None; the choice is recorded."""
    found = choose_cuda_ops(
        WHAT,
        capability,
        why="reads keys and values nearer to the memory's speed",
        instead_of="Triton",
        hopper_only=True,
        chosen=f"vllm_cuda for heads of {HEAD_DIMS}, up to {MAX_ROWS} query rows, float8 caches "
        "or few sequences, Triton for others",
    )
    return hopper_attention if found else None
