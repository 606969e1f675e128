# SPDX-License-Identifier: Apache-2.0
"""Grouped Mamba (arXiv 2312.00752, section 3) in plain torch, in fp32 or, for fp64 inputs, fp64.

Of channel c in head h, with a state `s [N]`, a step size `dt` and the head's B and C:
`s <- exp(-exp(A_log[c]) dt) s + dt x B; y = C s + D x`.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels.norm.naive import accumulation_dtype
from vllm.model_executor.layers.mamba.ops.causal_conv1d.naive import causal_conv1d
from vllm.model_executor.layers.mamba.ops.mamba1.problem import (
    Mamba1Decode,
    Mamba1Gates,
    Mamba1Prefill,
    repeat_groups,
)


def mamba1_prefill(problem: Mamba1Prefill) -> None:
    """The scan over a ragged batch: fills `out`, and each sequence's block with its final state."""
    starts = problem.query_start_loc.tolist()
    carried = problem.has_initial_state.tolist()
    for seq, index in enumerate(problem.state_indices.tolist()):
        part = slice(starts[seq], starts[seq + 1])
        if index < 0 or part.start == part.stop:
            continue
        wide = accumulation_dtype(problem.x)
        stored = problem.state[index].to(wide)
        state = stored if carried[seq] else torch.zeros_like(stored)
        y, state = _scan(problem.x[part].to(wide), problem.gates, part, state)
        problem.out[part] = y.to(problem.out.dtype)
        problem.state[index] = state.to(problem.state.dtype)


def mamba1_decode(problem: Mamba1Decode) -> None:
    """Convolution and scan of one token of each sequence."""
    indices = problem.state_indices
    carried = torch.ones(len(indices), dtype=torch.bool)
    starts = torch.arange(len(indices) + 1)
    mixed = torch.empty_like(problem.x)
    conv = (problem.conv_weight, problem.conv_bias, problem.conv_state, indices)
    causal_conv1d(problem.x, *conv, carried, starts, out=mixed)
    mixed = repeat_groups(mixed, problem.out.shape[1], problem.state.shape[2])
    sequences = (indices, carried, starts)
    mamba1_prefill(Mamba1Prefill(mixed, problem.gates, problem.state, *sequences, problem.out))


def _scan(x: Tensor, gates: Mamba1Gates, part: slice, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[tokens, channels]` and final state of one sequence; `x [tokens, channels]`."""
    heads, size, _ = state.shape
    per_head = (heads, size)
    dt = softplus(gates.dt[part].to(x.dtype) + gates.dt_bias.to(x.dtype)).unflatten(-1, per_head)
    x = x.unflatten(-1, per_head)
    B = gates.B[part].to(x.dtype).unflatten(-1, (-1, size))
    B = B.repeat_interleave(gates.heads_per_group, dim=1)
    C = gates.C[part].to(x.dtype).unflatten(-1, per_head)
    rate = -gates.A_log.to(x.dtype).exp().unflatten(0, per_head)
    outputs = []
    for t in range(len(x)):
        update = (dt[t] * x[t])[:, :, None] * B[t][:, None, :]
        state = (rate * dt[t][:, :, None]).exp() * state + update
        outputs.append((state * C[t][:, None, :]).sum(-1).flatten())
    own = gates.D.to(x.dtype) * x.flatten(1)
    return torch.stack(outputs) + own, state
