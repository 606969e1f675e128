# SPDX-License-Identifier: Apache-2.0
"""Mamba2 (arXiv 2405.21060) in plain torch, in fp32 or, for fp64 inputs, fp64.

Of one head, with a state `h [P, N]`, a step size `dt` and the B and C of the head's group:
`h <- exp(-exp(A_log) dt) h + (dt x) B^T; y = h C + D x`.
"""

from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels import naive_journal
from vllm.kernels.journal import JournalStack
from vllm.kernels.norm.naive import accumulation_dtype
from vllm.model_executor.layers.mamba.ops.mamba2.problem import (
    Mamba2Decode,
    Mamba2Gates,
    Mamba2Prefill,
    Mamba2Sizes,
)
from vllm.model_executor.layers.mamba.ops.naive import MakeTokens, convolve, decode, prefill


def mamba2_prefill(problem: Mamba2Prefill) -> None:
    """The recurrence over a ragged batch: fills `out`, and each sequence's block with its final
    state."""
    prefill(problem, _tokens_of(problem), accumulation_dtype(problem.x))


def mamba2_decode(problem: Mamba2Decode) -> None:
    """Convolution and recurrence of the next tokens. With a journal, states are only written by
    sequences that commit, as `GdnDecode` says.

    Raises:
        ValueError: the journal has too few places for what is pending and these tokens.
    """
    decode(problem, convolve(problem), _tokens_of(problem), accumulation_dtype(problem.x))


def mamba2_commit(stack: JournalStack, entries: Tensor) -> None:
    """As `gdn_commit`."""
    naive_journal.commit(stack, entries)


def _tokens_of(problem: Mamba2Prefill | Mamba2Decode) -> MakeTokens:
    return lambda xbc, part: _Tokens(xbc, problem.gates, part, problem.sizes)


class _Tokens:
    """Some tokens of a sequence in the accumulation dtype: `x [tokens, heads, P]`, `B, C [tokens,
    heads, N]`, step sizes `dt [tokens, heads]`."""

    def __init__(self, xbc: Tensor, gates: Mamba2Gates, part: slice, sizes: Mamba2Sizes) -> None:
        wide = accumulation_dtype(xbc)
        x, b, c = xbc.to(wide).split(sizes.sections, dim=-1)
        self.x = x.unflatten(-1, (sizes.num_heads, sizes.head_dim))
        shared = (sizes.num_groups, sizes.state_size)
        self._per_group = group = sizes.num_heads // sizes.num_groups
        self.B, self.C = (y.unflatten(-1, shared).repeat_interleave(group, 1) for y in (b, c))
        dt = softplus(gates.dt[part].to(wide) + gates.dt_bias.to(wide))
        self.dt = dt.clamp(*gates.dt_limit)
        self._decay = (-gates.A_log.to(wide).exp() * self.dt).exp()
        self._D = gates.D.to(wide)

    def __len__(self) -> int:
        return len(self.x)

    def update(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        error = self.dt[t, :, None] * self.x[t]
        return self.B[t, :: self._per_group], error, self._decay[t]

    def step(self, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output `[heads, P]` and state `[heads, P, N]` after token `t`."""
        x = self.x[t]
        update = (self.dt[t, :, None] * x)[:, :, None] * self.B[t][:, None, :]
        state = state * self._decay[t][:, None, None] + update
        y = (state * self.C[t][:, None, :]).sum(-1) + self._D[:, None] * x
        return y, state
