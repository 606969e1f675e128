# SPDX-License-Identifier: Apache-2.0
"""Latent attention on the CPU, absorbed, by the C++ kernel of attention with one key head.

That kernel wants keys and values in a cache of both, so the step's latents are copied into one
first. Queries of any length go the same way: a row's bits in fp32 depend neither on where a prompt
is cut nor on the other rows.
"""

import torch
from torch import Tensor

from vllm import decisions
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.attention.cpu import paged_attention
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.linear.cpu import linear, skinny_linear
from vllm.utils.math_utils import cdiv


def latent_attention(p: LatentAttentionProblem) -> None:
    """See `naive.latent_attention`."""
    decisions.record(
        "latent attention on the CPU",
        "absorbed, for prefills too",
        "so results do not depend on how a prompt is cut; the kernel of attention with one key "
        "head runs it, on a copy of the latents",
        instead_of="prefills by expanded keys and values",
    )
    if p.is_empty:
        return
    # Always the same kernel for fp32: how many rows there are depends on the whole batch.
    multiply = skinny_linear if p.query.dtype == torch.float32 else linear
    to_latent = p.kv_b[:, : p.nope].transpose(1, 2).contiguous()
    query = p.query.new_empty(p.num_tokens, p.num_heads, p.latent + p.shared)
    query[..., p.latent :] = p.query[..., p.nope :]
    for head in range(p.num_heads):
        query[:, head, : p.latent] = multiply(p.query[:, head, : p.nope], to_latent[head], None)
    attended = torch.empty_like(query)
    kv_cache, table = _copy_blocks(p)
    paged_attention(
        AttentionProblem(
            query,
            kv_cache,
            table,
            p.seq_lens,
            p.query_start_loc,
            max_query_len=p.max_query_len,
            max_seq_len=p.max_seq_len,
            scale=p.scale,
            sliding_window=None,
            out=attended,
        )
    )
    for head in range(p.num_heads):
        p.out[:, head] = multiply(attended[:, head, : p.latent], p.kv_b[head, p.nope :], None)


def _copy_blocks(p: LatentAttentionProblem) -> tuple[Tensor, Tensor]:
    """The sequences' blocks as keys and as values `[blocks, 2, block_size, 1, width]`, and the
    table that finds them there."""
    counts = [cdiv(length, p.block_size) for length in p.seq_lens.tolist()]
    used = torch.cat([p.block_table[seq, :count] for seq, count in enumerate(counts)])
    rows = p.cache[used.long()][:, None, :, None]
    table = p.block_table.new_zeros(p.num_seqs, max(*counts, 1))
    first = 0
    for seq, count in enumerate(counts):
        table[seq, :count] = torch.arange(first, first + count, dtype=table.dtype)
        first += count
    # Dense without blocks, too, which an expanded tensor of none is not.
    return torch.cat([rows, rows], dim=1), table
