# SPDX-License-Identifier: Apache-2.0
"""Expanded latent attention of one sequence with many queries, on a GPU.

Keys and values of the whole context, cached prefix included, are made from its latents into a
small cache of their own, which the prefill kernel of attention reads. As many heads at once as
`room` allows: a long context takes more passes, not more memory, and its bits stay the same.
"""

import torch
from torch import Tensor

from vllm.kernels.attention import AttentionProblem
from vllm.kernels.attention.triton import paged_attention
from vllm.kernels.latent_attention import LatentAttentionProblem, expansion_pays
from vllm.kernels.linear.naive import linear
from vllm.kernels.registry import Implementation
from vllm.utils.math_utils import cdiv

#: the widest head that the prefill kernel of attention has tiles for
_WIDEST_HEAD = 256


def takes_expanded(p: LatentAttentionProblem) -> bool:
    """Whether it is one sequence, expanding it pays, and one head of it has room."""
    return (
        p.num_seqs == 1
        and p.num_tokens > 0
        and expansion_pays(p.max_query_len, p.latent, p.nope, p.value)
        and _context(p) <= p.room
        and p.value <= p.query.shape[2] <= _WIDEST_HEAD
    )


def expanded_attention(p: LatentAttentionProblem) -> None:
    """Fill `p.out`, where `takes_expanded`."""
    blocks = cdiv(p.max_seq_len, p.block_size)
    rows = p.cache.index_select(0, p.block_table[0, :blocks])
    table = torch.arange(blocks, dtype=torch.int32, device=rows.device)[None]
    heads_at_once = min(p.num_heads, p.room // _context(p))
    for first in range(0, p.num_heads, heads_at_once):
        heads = slice(first, first + heads_at_once)
        query = p.query[:, heads]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        paged_attention(
            AttentionProblem(
                query,
                keys_and_values(p, rows, p.kv_b[heads]),
                table,
                p.seq_lens,
                p.query_start_loc,
                max_query_len=p.max_query_len,
                max_seq_len=p.max_seq_len,
                scale=p.scale,
                sliding_window=None,
                out=out,
            )
        )
        p.out[:, heads] = out[..., : p.value]


def _context(p: LatentAttentionProblem) -> int:
    """Tokens of whole blocks that hold the sequence."""
    return cdiv(p.max_seq_len, p.block_size) * p.block_size


def keys_and_values(p: LatentAttentionProblem, rows: Tensor, kv_b: Tensor) -> Tensor:
    """The cache `[blocks, 2, block_size, heads, nope + shared]` of the heads of `kv_b`, of `rows
    [blocks, block_size, latent + shared]`; values are filled up with zeros."""
    latent, shared = rows.split([p.latent, p.shared], dim=-1)
    made = linear(latent.flatten(0, 1), kv_b.flatten(0, 1), None)
    made = made.view(*rows.shape[:2], len(kv_b), p.nope + p.value)
    cache = rows.new_empty(len(rows), 2, p.block_size, len(kv_b), p.nope + p.shared)
    keys, values = cache.unbind(1)
    keys[..., : p.nope] = made[..., : p.nope]
    keys[..., p.nope :] = shared[:, :, None]
    values[..., : p.value] = made[..., p.nope :]
    values[..., p.value :] = 0
    return cache


latent_attention = Implementation(expanded_attention, takes_expanded)
