# SPDX-License-Identifier: Apache-2.0
"""Attention of long queries in CUDA C++ for Hopper: `csrc/cuda/hopper/prefill_attention.cuh`.

It takes bfloat16 queries over a bfloat16 or float8 cache, heads of 64, 128 or 256, windows, sinks
and gates. Drafters' blocks and short queries are left to Triton.
"""

import torch
from torch import Tensor

from vllm.kernels.attention import SHORT_ROWS, AttentionProblem, QueryRows
from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.fp8 import FP8
from vllm.kernels.registry import Implementation
from vllm.kernels.stream_counters import per_stream

HEAD_DIMS = (64, 128, 256)
#: query rows of a warpgroup: no more query heads may share a kv head
MAX_GROUP = 64
#: keys that one copy may bring
BOX_KEYS = 16
LOG2_E = 1.4426950408889634


def takes_attention(p: AttentionProblem) -> bool:
    """Whether the op takes this."""
    return (
        p.query.dtype == torch.bfloat16
        and p.kv_cache.dtype in (torch.bfloat16, FP8)
        and not p.is_empty
        and p.rows is QueryRows.TOKENS
        and p.head_dim in HEAD_DIMS
        and p.group <= MAX_GROUP
        and p.max_query_len * p.group > SHORT_ROWS
        and p.block_size % BOX_KEYS == 0
        and _blocks_at_16_bytes(p.kv_cache)
        and all(_at_16_bytes(rows) for rows in (p.query, p.out, p.gate) if rows is not None)
    )


def _at_16_bytes(rows: Tensor) -> bool:
    """Whether each head's elements are adjacent and start at a multiple of 16 bytes."""
    token, head, element = rows.stride()
    return element == 1 and token % 8 == head % 8 == rows.storage_offset() % 8 == 0


def _blocks_at_16_bytes(kv_cache: Tensor) -> bool:
    step = 16 // kv_cache.element_size()
    return kv_cache.stride(0) % step == kv_cache.storage_offset() % step == 0


@per_stream
def counter(device: torch.device) -> Tensor:
    """`[1]` int32, zero between launches."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def hopper_attention(p: AttentionProblem) -> None:
    """Fill `p.out`, where `takes_attention`."""
    torch.ops.vllm_cuda.prefill_attention.default(
        p.query,
        p.kv_cache,
        p.block_table,
        p.seq_lens,
        p.query_start_loc,
        p.out,
        p.gate,
        p.sinks,
        counter(p.query.device),
        p.sliding_window or 0,
        p.scale * p.k_scale * LOG2_E,
        p.v_scale,
    )


OPS = CudaOps(
    what="attention of long queries",
    why="multiplies on wgmma while softmax runs",
    instead_of="Triton",
    chosen=f"vllm_cuda for heads of {HEAD_DIMS} over bfloat16 and float8 caches, Triton for others",
)
paged_attention = Implementation(hopper_attention, takes_attention, OPS)
