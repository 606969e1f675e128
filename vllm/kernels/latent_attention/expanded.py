# SPDX-License-Identifier: Apache-2.0
"""Expanded latent attention of one sequence with many queries, on a GPU.

Keys and values of the whole context, cached prefix included, are made from its latents into a
small cache of their own, which the prefill kernel of attention reads. There each head is a
sequence: how many there are at once does not change the kernel. `room` bounds them, so a long
context takes more passes, not more memory, and has the same bits.
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
    """Whether it is one sequence without padding, expanding it pays, and one head has room."""
    return (
        p.num_seqs == 1
        and p.num_tokens == p.max_query_len
        and expansion_pays(p.max_query_len, p.latent, p.nope, p.value)
        and _context(p) <= p.room
        and p.value <= p.query.shape[2] <= _WIDEST_HEAD
    )


def expanded_attention(p: LatentAttentionProblem) -> None:
    """Fill `p.out`, where `takes_expanded`."""
    rows = p.cache.index_select(0, p.block_table[0, : _context(p) // p.block_size])
    heads_at_once = min(p.num_heads, p.room // _context(p))
    for first in range(0, p.num_heads, heads_at_once):
        heads = slice(first, first + heads_at_once)
        # A copy, as the rows of a head become those of a sequence.
        query = p.query[:, heads].transpose(0, 1).contiguous()
        out = torch.empty_like(query)
        attend_by_head(p, query, keys_and_values(p, rows, p.kv_b[heads]), out)
        p.out[:, heads] = out[..., : p.value].transpose(0, 1)


def attend_by_head(p: LatentAttentionProblem, query: Tensor, cache: Tensor, out: Tensor) -> None:
    """Attention of `query, out [heads, tokens, nope + shared]`, each head over its blocks of the
    `cache` of `keys_and_values`."""
    count, device = len(query), query.device
    blocks = torch.arange(len(cache), dtype=torch.int32, device=device)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * p.num_tokens
    paged_attention(
        AttentionProblem(
            query.flatten(0, 1)[:, None],
            cache,
            blocks.view(count, -1),
            p.seq_lens.expand(count).contiguous(),
            starts,
            max_query_len=p.max_query_len,
            max_seq_len=p.max_seq_len,
            scale=p.scale,
            sliding_window=None,
            out=out.flatten(0, 1)[:, None],
        )
    )


def _context(p: LatentAttentionProblem) -> int:
    """Tokens of whole blocks that hold the sequence."""
    return cdiv(p.max_seq_len, p.block_size) * p.block_size


def keys_and_values(p: LatentAttentionProblem, rows: Tensor, kv_b: Tensor) -> Tensor:
    """The cache `[heads * blocks, 2, block_size, 1, nope + shared]` of the heads of `kv_b`, of
    `rows [blocks, block_size, latent + shared]`; values are filled up with zeros."""
    latent, shared = rows.split([p.latent, p.shared], dim=-1)
    made = linear(latent.flatten(0, 1), kv_b.flatten(0, 1), None)
    by_head = made.view(*rows.shape[:2], len(kv_b), p.nope + p.value).permute(2, 0, 1, 3)
    cache = rows.new_empty(len(kv_b), len(rows), 2, p.block_size, p.nope + p.shared)
    keys, values = cache.unbind(2)
    keys[..., : p.nope] = by_head[..., : p.nope]
    keys[..., p.nope :] = shared
    values[..., : p.value] = by_head[..., p.nope :]
    values[..., p.value :] = 0
    return cache.flatten(0, 1)[:, :, :, None]


latent_attention = Implementation(expanded_attention, takes_expanded)
