# SPDX-License-Identifier: Apache-2.0
"""Plain torch cache writes and attention over the paged cache."""

import torch
from torch import Tensor

from vllm.kernels.naive_norm import accumulation_dtype


def write_slots(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """`cache[slot // block_size, slot % block_size] = rows`, skipping negative slots.

    `rows [tokens, ...]`, `cache [num_blocks, block_size, ...]`, `slot_mapping [tokens]`.
    """
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = rows[keep].to(cache.dtype)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int | None,
    out: Tensor,
) -> None:
    """One sequence at a time; see `Kernels.paged_attention`."""
    starts = query_start_loc.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[seq], starts[seq + 1]
        if seq_len == 0 or start == end:
            continue
        key, value = gather_sequence(kv_cache, block_table[seq], seq_len)
        out[start:end] = attend(query[start:end], key, value, scale, sliding_window)


def gather_sequence(kv_cache: Tensor, blocks: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[seq_len, num_kv_heads, head_dim]` of one sequence."""
    block_size = kv_cache.shape[2]
    used = blocks[: -(-seq_len // block_size)].long()
    key, value = (kv_cache[used, i].flatten(0, 1)[:seq_len] for i in range(2))
    return key, value


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
) -> Tensor:
    """Causal attention of the last `len(query)` positions; all `[length, heads, head_dim]`."""
    wide = accumulation_dtype(query)
    group = query.shape[1] // key.shape[1]
    key = key.to(wide).repeat_interleave(group, dim=1)
    value = value.to(wide).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.to(wide), key) * scale
    k_pos = torch.arange(len(key), device=key.device)
    q_pos = k_pos[len(key) - len(query) :, None]
    visible = k_pos <= q_pos
    if sliding_window is not None:
        visible &= k_pos > q_pos - sliding_window
    # Blocks that slid out may be another group's by now: not even 0 times a value.
    value = value.masked_fill(~visible.any(0)[:, None, None], 0)
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, value).to(query.dtype)
