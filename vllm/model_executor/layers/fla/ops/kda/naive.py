# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention in plain torch, in fp32 or, for fp64 inputs, fp64.

Of one head, with a state `S [dk, dv]` and a decay for each key channel:
`S <- diag(exp(g)) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q`.
q and k are l2-normalised (`x * rsqrt(sum(x^2) + 1e-6)`), q times `dk ** -0.5`.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels import naive_gdn, naive_journal
from vllm.kernels.journal import JournalStack
from vllm.kernels.naive_gdn import Gates
from vllm.kernels.norm.naive import accumulation_dtype
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode, KdaGates, KdaPrefill
from vllm.model_executor.layers.mamba.ops.causal_conv1d.naive import naive_causal_conv1d


def kda_prefill(problem: KdaPrefill) -> None:
    """The recurrence over a ragged batch: fills `out`, and each sequence's block with its final
    state."""
    naive_gdn.gated_delta_rule(
        problem.qkv,
        _gates_of(problem.gates),
        problem.state,
        problem.state_indices,
        problem.has_initial_state,
        problem.query_start_loc,
        problem.heads,
        problem.out,
    )


def kda_decode(problem: KdaDecode) -> None:
    """Convolution and recurrence of the next tokens. With a journal, states are only written by
    sequences that commit, as `Kernels.gdn_decode` says.

    Raises:
        ValueError: the journal has too few places for what is pending and these tokens.
    """
    gates, indices, journal = _gates_of(problem.gates), problem.state_indices, problem.journal
    conv = (problem.conv_weight, None, problem.conv_state, indices)
    if journal is not None:
        mixed = naive_journal.convolve_tokens(problem.qkv, *conv, journal, problem.width)
        states = (problem.state, indices, journal)
        naive_journal.decode(mixed, gates, *states, problem.heads, problem.out, problem.width)
        return
    carried = torch.ones(len(indices), dtype=torch.bool)
    starts = torch.arange(len(indices) + 1)
    mixed = torch.empty_like(problem.qkv)
    naive_causal_conv1d(problem.qkv, *conv, carried, starts, mixed)
    sequences = (indices, carried, starts)
    naive_gdn.gated_delta_rule(mixed, gates, problem.state, *sequences, problem.heads, problem.out)


def kda_commit(stack: JournalStack, entries: Tensor) -> None:
    """As `Kernels.gdn_commit`, of a journal with decays for each key channel."""
    naive_journal.commit(stack, entries)


def _gates_of(gates: KdaGates) -> Gates:
    wide = accumulation_dtype(gates.a)

    def of(part: slice) -> tuple[Tensor, Tensor]:
        rate = -gates.A_log.to(wide).exp()[:, None]
        g = rate * softplus(gates.a[part].to(wide) + gates.dt_bias.to(wide))
        return g, torch.sigmoid(gates.b[part].to(wide))

    return of
