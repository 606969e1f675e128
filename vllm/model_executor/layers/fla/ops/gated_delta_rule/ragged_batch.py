# SPDX-License-Identifier: Apache-2.0
"""`[B, T, ...]` inputs of the published interface as one ragged batch with its own state pool."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RaggedBatch:
    """`q, k [tokens, k heads, dk]`, `v [tokens, v heads, dv]`, `g, beta [tokens, v heads]`,
    `state [sequences, v heads, dv, dk]` fp32 (a private copy), `starts [sequences + 1]` int32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    state_indices: Tensor
    starts: Tensor


def flatten_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> RaggedBatch:
    """See `chunk_gated_delta_rule` for shapes and errors."""
    batch, length, heads, dv = v.shape
    if cu_seqlens is None:
        starts = torch.arange(batch + 1, dtype=torch.int32, device=v.device) * length
    elif batch == 1:
        starts = cu_seqlens.to(torch.int32)
    else:
        raise ValueError(f"cu_seqlens needs a batch of one, got {batch}")
    num_seqs = len(starts) - 1
    shape = (num_seqs, heads, k.shape[-1], dv)
    if initial_state is None:
        state = torch.zeros(num_seqs, heads, dv, k.shape[-1], device=v.device)
    elif initial_state.shape == shape:
        state = torch.empty(num_seqs, heads, dv, k.shape[-1], device=v.device)
        state.copy_(initial_state.mT)
    else:
        raise ValueError(f"initial_state must be {shape}, got {tuple(initial_state.shape)}")
    q, k, v, g, beta = (x.contiguous().flatten(0, 1) for x in (q, k, v, g, beta))
    return RaggedBatch(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        state=state,
        state_indices=torch.arange(num_seqs, dtype=torch.int32, device=v.device),
        starts=starts,
    )
