# SPDX-License-Identifier: Apache-2.0
"""Mamba2 on the CPU: `csrc/cpu/kernels/mamba2.cpp`. Its journal's updates are the gated delta
rule's."""

from torch import Tensor

from vllm._extension import cpu_ops
from vllm.model_executor.layers.fla.ops.gated_delta_rule.cpu import gdn_commit as mamba2_commit
from vllm.model_executor.layers.fla.ops.gated_delta_rule.cpu import journal_fields
from vllm.model_executor.layers.mamba.ops.mamba2.problem import Mamba2Decode, Mamba2Prefill

__all__ = ["mamba2_commit", "mamba2_decode", "mamba2_prefill"]

_ops = cpu_ops()
_prefill = _ops.mamba2_prefill.default
_decode = _ops.mamba2_decode.default


def mamba2_prefill(problem: Mamba2Prefill) -> None:
    """See `naive.mamba2_prefill`."""
    _prefill(*_common(problem), problem.has_initial_state, problem.query_start_loc)


def mamba2_decode(problem: Mamba2Decode) -> None:
    """See `naive.mamba2_decode`."""
    convolution = (problem.conv_weight, problem.conv_bias, problem.conv_state)
    _decode(*_common(problem), *convolution, *journal_fields(problem.journal))


def _common(p: Mamba2Prefill | Mamba2Decode) -> tuple[Tensor | float, ...]:
    gates = p.gates
    return (
        p.x,
        gates.dt,
        gates.A_log,
        gates.dt_bias,
        gates.D,
        *gates.dt_limit,
        p.state,
        p.state_indices,
        p.sizes.num_groups,
        p.out,
    )
