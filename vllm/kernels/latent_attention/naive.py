# SPDX-License-Identifier: Apache-2.0
"""Latent attention in plain torch, expanded: what every platform computes."""

import torch
from torch import Tensor

from vllm.kernels.attention.naive import attend
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.norm.naive import accumulation_dtype


def latent_attention(p: LatentAttentionProblem) -> None:
    """Fill `p.out`, one sequence at a time."""
    starts = p.query_start_loc.tolist()
    for seq, seq_len in enumerate(p.seq_lens.tolist()):
        start, end = starts[seq], starts[seq + 1]
        if seq_len == 0 or start == end:
            continue
        key, value = expand(p, gather_rows(p, seq, seq_len))
        query = p.query[start:end]
        p.out[start:end] = attend(query, key, value, p.scale, None)


def gather_rows(p: LatentAttentionProblem, seq: int, seq_len: int) -> Tensor:
    """The cached rows of one sequence, `[seq_len, latent + shared]`."""
    used = p.block_table[seq, : -(-seq_len // p.block_size)].long()
    return p.cache[used].flatten(0, 1)[:seq_len]


def expand(p: LatentAttentionProblem, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[tokens, heads, nope + shared]` and values `[tokens, heads, value]` of `rows`."""
    wide = accumulation_dtype(rows)
    latent, shared = rows.to(wide).split([p.latent, p.shared], dim=-1)
    made = torch.einsum("tl,hdl->thd", latent, p.kv_b.to(wide))
    key, value = made.split([p.nope, p.value], dim=-1)
    return torch.cat([key, shared[:, None].expand(-1, p.num_heads, -1)], dim=-1), value
