# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention in plain torch, in fp32 or, for fp64 inputs, fp64.

Of one head, with a state `S [dk, dv]` and a decay for each key channel:
`S <- diag(exp(g)) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q`.
q and k are l2-normalised (`x * rsqrt(sum(x^2) + 1e-6)`), q times `dk ** -0.5`.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels.journal import JournalStack
from vllm.kernels.norm.naive import accumulation_dtype
from vllm.model_executor.layers.fla.ops.gated_delta_rule import naive
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import Gates
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode, KdaGates, KdaPrefill


def kda_prefill(problem: KdaPrefill) -> None:
    """The recurrence over a ragged batch: fills `out`, and each sequence's block with its final
    state."""
    naive.gated_delta_rule(
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
    sequences that commit, as `GdnDecode` says.

    Raises:
        ValueError: the journal has too few places for what is pending and these tokens.
    """
    conv = (problem.conv_weight, None, problem.conv_state, problem.state_indices)
    naive.decode(
        problem.qkv,
        conv,
        _gates_of(problem.gates),
        problem.state,
        problem.heads,
        problem.out,
        problem.journal,
        problem.width,
    )


def kda_commit(stack: JournalStack, entries: Tensor) -> None:
    """As `gdn_commit`, of a journal with decays for each key channel."""
    naive.gdn_commit(stack, entries)


def _gates_of(gates: KdaGates) -> Gates:
    wide = accumulation_dtype(gates.a)

    def of(part: slice) -> tuple[Tensor, Tensor]:
        rate = -gates.A_log.to(wide).exp()[:, None]
        g = rate * softplus(gates.a[part].to(wide) + gates.dt_bias.to(wide))
        return g, torch.sigmoid(gates.b[part].to(wide))

    return of
