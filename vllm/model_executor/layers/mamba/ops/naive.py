# SPDX-License-Identifier: Apache-2.0
"""What the references of Mamba1 and Mamba2 share: sequence by sequence, token by token."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm.kernels import naive_journal
from vllm.model_executor.layers.mamba.ops.causal_conv1d.naive import causal_conv1d
from vllm.model_executor.layers.mamba.ops.problem import MambaDecode, MambaPrefill


class Tokens(Protocol):
    """Some tokens of a sequence, in the accumulation dtype."""

    def __len__(self) -> int: ...

    def step(self, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output and state after token `t`."""

    def update(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """Key of each group, error and decay of token `t`, as a journal keeps them."""


#: of the convolution's output `[tokens, channels]` of these tokens of the batch
MakeTokens = Callable[[Tensor, slice], Tokens]


def prefill(p: MambaPrefill[Any], tokens_of: MakeTokens, dtype: torch.dtype) -> None:
    """Fill `out`, and each sequence's block with its final state; `dtype`: of accumulation."""
    starts, carried = p.query_start_loc.tolist(), p.has_initial_state.tolist()
    for seq, index in enumerate(p.state_indices.tolist()):
        part = slice(starts[seq], starts[seq + 1])
        if index < 0 or part.start == part.stop:
            continue
        tokens = tokens_of(p.x[part], part)
        stored = p.state[index].to(dtype)
        state = stored if carried[seq] else torch.zeros_like(stored)
        for t in range(len(tokens)):
            y, state = tokens.step(t, state)
            p.out[part.start + t] = y.to(p.out.dtype)
        p.state[index] = state.to(p.state.dtype)


def convolve(p: MambaDecode[Any]) -> Tensor:
    """The convolution of a decode and SiLU, `[tokens, channels]`."""
    conv = (p.conv_weight, p.conv_bias, p.conv_state, p.state_indices)
    if p.journal is not None:
        return naive_journal.convolve_tokens(p.x, *conv, p.journal, p.width)
    mixed, count = torch.empty_like(p.x), len(p.state_indices)
    causal_conv1d(
        p.x, *conv, torch.ones(count, dtype=torch.bool), torch.arange(count + 1), out=mixed
    )
    return mixed


def decode(p: MambaDecode[Any], mixed: Tensor, tokens_of: MakeTokens, dtype: torch.dtype) -> None:
    """What follows the convolution, whose output is `mixed`. With a journal, states are only
    written by sequences that commit; without one, by all."""
    width, journal = p.width, p.journal
    for seq, index in enumerate(p.state_indices.tolist()):
        if index < 0:
            continue
        stored = p.state[index]
        row, pending, commits, first = 0, 0, 1, 0
        if journal is not None:
            row, pending, commits, first = journal.steps[seq].tolist()
            naive_journal.check_places(journal, row, pending + width - commits)
            stored = naive_journal.replay(stored, journal, row, first, pending)
        part = slice(seq * width, (seq + 1) * width)
        tokens = tokens_of(mixed[part], part)
        for t in range(width):
            y, state = tokens.step(t, stored.to(dtype))
            p.out[part.start + t] = y.to(p.out.dtype)
            stored = state.to(p.state.dtype)
            if commits and t == 0:
                p.state[index] = stored
            elif journal is not None:
                place = (first + pending + t - commits) % journal.places
                key, error, decay = tokens.update(t)
                journal.keys[row, place] = key
                journal.errors[row, place] = error
                journal.decays[row, place] = decay
