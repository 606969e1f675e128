# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache in plain torch: what every platform computes."""

import torch
from torch import Tensor

from vllm.kernels.activation.naive import mul_sigmoid
from vllm.kernels.attention import AttentionProblem, QueryRows
from vllm.kernels.norm.naive import accumulation_dtype


def paged_attention(p: AttentionProblem) -> None:
    """Fill `p.out`, one sequence at a time."""
    starts = p.query_start_loc.tolist()
    for seq, seq_len in enumerate(p.seq_lens.tolist()):
        start, end = starts[seq], starts[seq + 1]
        if seq_len == 0 or start == end:
            continue
        key, value = gather_sequence(p.kv_cache, p.block_table[seq], seq_len)
        scale, window = p.scale * p.k_scale, p.sliding_window
        query = p.query[start:end]
        p.out[start:end] = attend(query, key, value, scale, window, p.rows, p.sinks)
    if p.v_scale != 1.0:
        p.out.mul_(p.v_scale)
    if p.gate is not None:
        p.out.copy_(mul_sigmoid(p.out, p.gate).view(p.out.shape))


def gather_sequence(kv_cache: Tensor, blocks: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[seq_len, num_kv_heads, head_dim]` of one sequence."""
    block_size = kv_cache.shape[2]
    used = blocks[: -(-seq_len // block_size)].long()
    key, value = (kv_cache[used, i].flatten(0, 1)[:seq_len] for i in range(2))
    return key, value


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sliding_window: int | None,
    rows: QueryRows = QueryRows.TOKENS,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last `len(query)` positions; all `[length, heads, head_dim]`.

    `sinks [heads]` are scores of what has no value.
    """
    wide = accumulation_dtype(query)
    group = query.shape[1] // key.shape[1]
    key = key.to(wide).repeat_interleave(group, dim=1)
    value = value.to(wide).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.to(wide), key) * scale
    k_pos = torch.arange(len(key), device=key.device)
    q_pos = k_pos[len(key) - len(query) :, None]
    newest = q_pos[-1:] if rows is QueryRows.WHOLE_BLOCK else q_pos
    visible = (k_pos <= newest).expand(len(query), -1)
    if sliding_window is not None:
        first = q_pos if rows is QueryRows.TOKENS else q_pos[:1]
        visible = visible & (k_pos > first - sliding_window)
    # Blocks that slid out may be another group's by now: not even 0 times a value.
    value = value.masked_fill(~visible.any(0)[:, None, None], 0)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        probs = scores.softmax(-1)
    else:
        column = sinks.to(wide)[:, None, None].expand(-1, len(query), 1)
        probs = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", probs, value).to(query.dtype)
