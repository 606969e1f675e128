# SPDX-License-Identifier: Apache-2.0
"""Grouped Mamba (arXiv 2312.00752, section 3) in plain torch, in fp32 or, for fp64 inputs, fp64.

Of channel c in head h, with a state `s [N]`, a step size `dt` and the head's B and C:
`s <- exp(-exp(A_log[c]) dt) s + dt x B; y = C s + D x`.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels import naive_journal
from vllm.kernels.journal import JournalStack
from vllm.kernels.norm.naive import accumulation_dtype
from vllm.model_executor.layers.mamba.ops.mamba1.problem import (
    Mamba1Decode,
    Mamba1Gates,
    Mamba1Prefill,
    repeat_groups,
)
from vllm.model_executor.layers.mamba.ops.naive import MakeTokens, convolve, decode, prefill


def mamba1_prefill(problem: Mamba1Prefill) -> None:
    """The scan over a ragged batch: fills `out`, and each sequence's block with its final state."""
    prefill(problem, _tokens_of(problem), accumulation_dtype(problem.x))


def mamba1_decode(problem: Mamba1Decode) -> None:
    """Convolution and scan of the next tokens. With a journal, states are only written by sequences
    that commit, as `GdnDecode` says.

    Raises:
        ValueError: the journal has too few places for what is pending and these tokens.
    """
    mixed = repeat_groups(convolve(problem), problem.out.shape[1], problem.state.shape[2])
    decode(problem, mixed, _tokens_of(problem), accumulation_dtype(mixed))


def mamba1_commit(stack: JournalStack, entries: Tensor) -> None:
    """As `gdn_commit`."""
    naive_journal.commit(stack, entries)


def _tokens_of(problem: Mamba1Prefill | Mamba1Decode) -> MakeTokens:
    return lambda x, part: _Tokens(x, problem.gates, part, problem.state.shape[1:3])


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
        self._per_group = gates.heads_per_group
        self._log_rates = gates.A_log
        self._D = gates.D.to(wide)

    def __len__(self) -> int:
        return len(self.x)

    def update(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.B[t, :: self._per_group], self.dt[t] * self.x[t], self.dt[t]

    def step(self, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output `[channels]` and state `[heads, N, N]` after token `t`."""
        x, dt = self.x[t], self.dt[t]
        state = state * naive_journal.element_decay(self._log_rates, dt)
        state = state + (dt * x)[:, :, None] * self.B[t][:, None, :]
        y = (state * self.C[t][:, None, :]).sum(-1).flatten() + self._D * x.flatten()
        return y, state
