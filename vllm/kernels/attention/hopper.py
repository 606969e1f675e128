# SPDX-License-Identifier: Apache-2.0
"""Attention of short queries in CUDA C++ for Hopper: `csrc/cuda/hopper/decode_attention.cu`.

It takes bfloat16 queries of heads of 128 or 256 and up to `MAX_ROWS` query rows (tokens of a
sequence times query heads of a kv head), over a float8 cache or, where every share of the keys has
a multiprocessor of its own, over a bfloat16 one: otherwise Triton is as fast or faster.
"""

import torch
from torch import Tensor

from vllm.kernels import fp8
from vllm.kernels.attention import AttentionProblem, QueryRows
from vllm.kernels.cuda_library import CudaOps, overlaps
from vllm.kernels.registry import Implementation
from vllm.kernels.stream_counters import per_stream
from vllm.kernels.triton.configs import device_configs
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


def takes_attention(p: AttentionProblem) -> bool:
    """Whether the op takes this on the problem's GPU."""
    return (
        p.query.dtype == torch.bfloat16
        and not p.is_empty
        and p.rows is QueryRows.TOKENS
        and p.sinks is None
        and (p.kv_cache.dtype is fp8.FP8 or _fits_at_once(p))
        and p.head_dim in HEAD_DIMS
        and p.group * p.max_query_len <= MAX_ROWS
        and p.block_size % TILE_KEYS == 0
        and p.num_seqs <= MAX_SEQUENCES
        and _at_16_bytes(p.kv_cache)
        and all(_at_8_bytes(rows) for rows in (p.query, p.out, p.gate) if rows is not None)
    )


def _fits_at_once(p: AttentionProblem) -> bool:
    """Whether two shares of every sequence do, and the cache is bfloat16."""
    chip = device_configs(p.query.device).multiprocessors
    return p.kv_cache.dtype == torch.bfloat16 and 2 * p.num_seqs * p.num_kv_heads <= chip


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


@per_stream
def arrivals(device: torch.device, num_kv_heads: int) -> Tensor:
    """`[MAX_SEQUENCES * num_kv_heads]` int32, zero between launches."""
    return torch.zeros(MAX_SEQUENCES * num_kv_heads, dtype=torch.int32, device=device)


def hopper_attention(p: AttentionProblem) -> None:
    """Fill `p.out`, where `takes_attention`.

    In a graph it may start before the kernels ahead of it end, and reads keys and values of earlier
    tokens meanwhile: no kernel of the graph but the step's cache write may write them.
    """
    row_numbers = p.max_query_len * p.num_heads * p.head_dim
    device = p.query.device
    chip = device_configs(device).multiprocessors
    splits, split_keys = num_shares(p.num_seqs, p.num_kv_heads, p.max_seq_len, row_numbers, chip)
    part = lse = arrived = None
    if splits > 1:
        shape = (p.num_tokens, p.num_heads, splits)
        part = torch.empty(*shape, p.head_dim, dtype=torch.float32, device=device)
        lse = torch.empty(shape, dtype=torch.float32, device=device)
        arrived = arrivals(device, p.num_kv_heads)
    torch.ops.vllm_cuda.decode_attention.default(
        p.query,
        p.kv_cache,
        p.block_table,
        p.seq_lens,
        p.query_start_loc,
        p.out,
        p.gate,
        part,
        lse,
        arrived,
        p.max_query_len,
        splits,
        split_keys,
        p.sliding_window or 0,
        p.scale * p.k_scale * LOG2_E,
        p.v_scale,
        overlaps(),
    )


OPS = CudaOps(
    what="attention of short queries",
    why="reads keys and values nearer to the memory's speed",
    instead_of="Triton",
    chosen=f"vllm_cuda for heads of {HEAD_DIMS}, up to {MAX_ROWS} query rows, float8 caches "
    "or few sequences, Triton for others",
)
paged_attention = Implementation(hopper_attention, takes_attention, OPS)
