# SPDX-License-Identifier: Apache-2.0
"""Plain torch gated delta rule over the state pool."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.kernels.norm.naive import accumulation_dtype
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import (
    gdn_gates,
    l2_normalise,
    naive_recurrent_gated_delta_rule,
)

#: `(log decay, beta)` of some of a batch's tokens: `[tokens, v heads]` each, in the accumulation
#: dtype; a log decay may have one value per key channel, `[tokens, v heads, dk]`
Gates = Callable[[slice], tuple[Tensor, Tensor]]


def gates_of(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Gates:
    """The gates of `Kernels.gdn_prefill`."""
    wide = accumulation_dtype(a)
    return lambda part: gdn_gates(a[part].to(wide), b[part].to(wide), A_log, dt_bias)


def split_qkv(
    qkv: Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`q, k [tokens, num_v_heads, head_k_dim]` (l2-normalised, repeated per value head) and
    `v [tokens, num_v_heads, head_v_dim]`, all in the accumulation dtype."""
    key_dim = num_k_heads * head_k_dim
    sections = [key_dim, key_dim, num_v_heads * head_v_dim]
    q, k, v = qkv.to(accumulation_dtype(qkv)).split(sections, dim=-1)
    group = num_v_heads // num_k_heads
    q, k = (
        l2_normalise(x.unflatten(-1, (num_k_heads, head_k_dim))).repeat_interleave(group, dim=1)
        for x in (q, k)
    )
    return q, k, v.unflatten(-1, (num_v_heads, head_v_dim))


def gated_delta_rule(
    qkv: Tensor,
    gates: Gates,
    ssm_state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
    heads: tuple[int, int, int, int],
    out: Tensor,
) -> None:
    """The recurrence, one sequence at a time; `heads` are the last arguments of `split_qkv`."""
    starts = query_start_loc.tolist()
    carried = has_initial_state.tolist()
    for seq, index in enumerate(state_indices.tolist()):
        start, end = starts[seq], starts[seq + 1]
        if index < 0 or start == end:
            continue
        part = slice(start, end)
        q, k, v = split_qkv(qkv[part], *heads)
        g, beta = gates(part)
        stored = ssm_state[index].mT.to(q.dtype)
        state = stored if carried[seq] else torch.zeros_like(stored)
        scale = heads[2] ** -0.5
        o, state = naive_recurrent_gated_delta_rule(q, k, v, g, beta, scale, state)
        out[part] = o.to(out.dtype)
        ssm_state[index] = state.mT.to(ssm_state.dtype)
