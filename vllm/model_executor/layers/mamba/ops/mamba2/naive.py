# SPDX-License-Identifier: Apache-2.0
"""Mamba2 (arXiv 2405.21060) in plain torch, in fp32 or, for fp64 inputs, fp64.

Of one head, with a state `h [P, N]`, a step size `dt` and the B and C of the head's group:
`h <- exp(-exp(A_log) dt) h + (dt x) B^T; y = h C + D x`.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels import naive_journal
from vllm.kernels.journal import Journal, JournalStack
from vllm.kernels.norm.naive import accumulation_dtype
from vllm.model_executor.layers.mamba.ops.causal_conv1d.naive import causal_conv1d
from vllm.model_executor.layers.mamba.ops.mamba2.problem import (
    Mamba2Decode,
    Mamba2Gates,
    Mamba2Prefill,
    Mamba2Sizes,
)


def mamba2_prefill(problem: Mamba2Prefill) -> None:
    """The recurrence over a ragged batch: fills `out`, and each sequence's block with its final
    state."""
    starts = problem.query_start_loc.tolist()
    carried = problem.has_initial_state.tolist()
    for seq, index in enumerate(problem.state_indices.tolist()):
        part = slice(starts[seq], starts[seq + 1])
        if index < 0 or part.start == part.stop:
            continue
        tokens = _Tokens(problem.xbc[part], problem.gates, part, problem.sizes)
        stored = problem.state[index].to(tokens.x.dtype)
        state = stored if carried[seq] else torch.zeros_like(stored)
        for t in range(len(tokens.x)):
            y, _, state = tokens.step(t, state)
            problem.out[part.start + t] = y.to(problem.out.dtype)
        problem.state[index] = state.to(problem.state.dtype)


def mamba2_decode(problem: Mamba2Decode) -> None:
    """Convolution and recurrence of the next tokens. With a journal, states are only written by
    sequences that commit, as `GdnDecode` says.

    Raises:
        ValueError: the journal has too few places for what is pending and these tokens.
    """
    indices, journal, width = problem.state_indices, problem.journal, problem.width
    conv = (problem.conv_weight, problem.conv_bias, problem.conv_state, indices)
    if journal is not None:
        mixed = naive_journal.convolve_tokens(problem.xbc, *conv, journal, width)
        _decode_with(journal, mixed, problem)
        return
    carried = torch.ones(len(indices), dtype=torch.bool)
    starts = torch.arange(len(indices) + 1)
    mixed = torch.empty_like(problem.xbc)
    causal_conv1d(problem.xbc, *conv, carried, starts, out=mixed)
    sequences = (indices, carried, starts)
    mamba2_prefill(Mamba2Prefill(mixed, problem.gates, problem.state, *sequences, problem.out))


def mamba2_commit(stack: JournalStack, entries: Tensor) -> None:
    """As `gdn_commit`."""
    naive_journal.commit(stack, entries)


def _decode_with(journal: Journal, mixed: Tensor, problem: Mamba2Decode) -> None:
    width, sizes = problem.width, problem.sizes
    group = sizes.num_heads // sizes.num_groups
    for seq, index in enumerate(problem.state_indices.tolist()):
        if index < 0:
            continue
        row, pending, commits, first = journal.steps[seq].tolist()
        naive_journal.check_places(journal, row, pending + width - commits)
        part = slice(seq * width, (seq + 1) * width)
        tokens = _Tokens(mixed[part], problem.gates, part, sizes)
        stored = naive_journal.replay(problem.state[index], journal, row, first, pending)
        for t in range(width):
            y, decay, state = tokens.step(t, stored.to(tokens.x.dtype))
            problem.out[seq * width + t] = y.to(problem.out.dtype)
            stored = state.to(problem.state.dtype)
            if commits and t == 0:
                problem.state[index] = stored
                continue
            place = (first + pending + t - commits) % journal.places
            journal.keys[row, place] = tokens.B[t, ::group]
            journal.errors[row, place] = tokens.dt[t, :, None] * tokens.x[t]
            journal.decays[row, place] = decay


class _Tokens:
    """Some tokens of a sequence in the accumulation dtype: `x [tokens, heads, P]`, `B, C [tokens,
    heads, N]`, step sizes `dt [tokens, heads]`."""

    def __init__(self, xbc: Tensor, gates: Mamba2Gates, part: slice, sizes: Mamba2Sizes) -> None:
        wide = accumulation_dtype(xbc)
        x, b, c = xbc.to(wide).split(sizes.sections, dim=-1)
        self.x = x.unflatten(-1, (sizes.num_heads, sizes.head_dim))
        shared = (sizes.num_groups, sizes.state_size)
        group = sizes.num_heads // sizes.num_groups
        self.B, self.C = (y.unflatten(-1, shared).repeat_interleave(group, 1) for y in (b, c))
        dt = softplus(gates.dt[part].to(wide) + gates.dt_bias.to(wide))
        self.dt = dt.clamp(*gates.dt_limit)
        self._decay = (-gates.A_log.to(wide).exp() * self.dt).exp()
        self._D = gates.D.to(wide)

    def step(self, t: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output `[heads, P]`, decay `[heads]` and state `[heads, P, N]` after token `t`."""
        x, decay = self.x[t], self._decay[t]
        update = (self.dt[t, :, None] * x)[:, :, None] * self.B[t][:, None, :]
        state = state * decay[:, None, None] + update
        y = (state * self.C[t][:, None, :]).sum(-1) + self._D[:, None] * x
        return y, decay, state
