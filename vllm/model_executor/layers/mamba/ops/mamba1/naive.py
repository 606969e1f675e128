# SPDX-License-Identifier: Apache-2.0
"""Grouped Mamba (arXiv 2312.00752, section 3) in plain torch, in fp32 or, for fp64 inputs, fp64.

Of channel c in head h, with a state `s [N]`, a step size `dt` and the head's B and C:
`s <- exp(-exp(A_log[c]) dt) s + dt x B; y = C s + D x`.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels import naive_journal
from vllm.kernels.journal import Journal, JournalStack
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
        tokens = _Tokens(problem.x[part], problem.gates, part, problem.state.shape[1:3])
        stored = problem.state[index].to(tokens.x.dtype)
        state = stored if carried[seq] else torch.zeros_like(stored)
        for t in range(len(tokens.x)):
            y, state = tokens.step(t, state)
            problem.out[part.start + t] = y.to(problem.out.dtype)
        problem.state[index] = state.to(problem.state.dtype)


def mamba1_decode(problem: Mamba1Decode) -> None:
    """Convolution and scan of the next tokens. With a journal, states are only written by sequences
    that commit, as `GdnDecode` says.

    Raises:
        ValueError: the journal has too few places for what is pending and these tokens.
    """
    indices, journal, width = problem.state_indices, problem.journal, problem.width
    conv = (problem.conv_weight, problem.conv_bias, problem.conv_state, indices)
    channels, head_dim = problem.out.shape[1], problem.state.shape[2]
    if journal is not None:
        mixed = naive_journal.convolve_tokens(problem.x, *conv, journal, width)
        _decode_with(journal, repeat_groups(mixed, channels, head_dim), problem)
        return
    carried = torch.ones(len(indices), dtype=torch.bool)
    starts = torch.arange(len(indices) + 1)
    mixed = torch.empty_like(problem.x)
    causal_conv1d(problem.x, *conv, carried, starts, out=mixed)
    mixed = repeat_groups(mixed, channels, head_dim)
    sequences = (indices, carried, starts)
    mamba1_prefill(Mamba1Prefill(mixed, problem.gates, problem.state, *sequences, problem.out))


def mamba1_commit(stack: JournalStack, entries: Tensor) -> None:
    """As `gdn_commit`."""
    naive_journal.commit(stack, entries)


def _decode_with(journal: Journal, mixed: Tensor, problem: Mamba1Decode) -> None:
    width, group = problem.width, problem.gates.heads_per_group
    for seq, index in enumerate(problem.state_indices.tolist()):
        if index < 0:
            continue
        row, pending, commits, first = journal.steps[seq].tolist()
        naive_journal.check_places(journal, row, pending + width - commits)
        part = slice(seq * width, (seq + 1) * width)
        tokens = _Tokens(mixed[part], problem.gates, part, problem.state.shape[1:3])
        stored = naive_journal.replay(problem.state[index], journal, row, first, pending)
        for t in range(width):
            y, state = tokens.step(t, stored.to(tokens.x.dtype))
            problem.out[part.start + t] = y.to(problem.out.dtype)
            stored = state.to(problem.state.dtype)
            if commits and t == 0:
                problem.state[index] = stored
                continue
            place = (first + pending + t - commits) % journal.places
            journal.keys[row, place] = tokens.B[t, ::group]
            journal.errors[row, place] = tokens.dt[t] * tokens.x[t]
            journal.decays[row, place] = tokens.dt[t]


class _Tokens:
    """Some tokens of a sequence in the accumulation dtype: `x, B, C` and step sizes `dt`, all
    `[tokens, heads, N]`."""

    def __init__(self, x: Tensor, gates: Mamba1Gates, part: slice, per_head: torch.Size) -> None:
        wide, size = accumulation_dtype(x), per_head[1]
        self.x = x.to(wide).unflatten(-1, per_head)
        dt = softplus(gates.dt[part].to(wide) + gates.dt_bias.to(wide))
        self.dt = dt.unflatten(-1, per_head)
        B = gates.B[part].to(wide).unflatten(-1, (-1, size))
        self.B = B.repeat_interleave(gates.heads_per_group, dim=1)
        self.C = gates.C[part].to(wide).unflatten(-1, per_head)
        self._log_rates = gates.A_log
        self._D = gates.D.to(wide)

    def step(self, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output `[channels]` and state `[heads, N, N]` after token `t`."""
        x, dt = self.x[t], self.dt[t]
        state = state * naive_journal.element_decay(self._log_rates, dt)
        state = state + (dt * x)[:, :, None] * self.B[t][:, None, :]
        y = (state * self.C[t][:, None, :]).sum(-1).flatten() + self._D * x.flatten()
        return y, state
