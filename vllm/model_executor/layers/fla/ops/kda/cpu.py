# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention on the CPU: `csrc/cpu/kernels/kda_prefill.cpp` and `gdn_decode.cpp`."""

from vllm._extension import cpu_ops
from vllm.model_executor.layers.fla.ops.gated_delta_rule.cpu import gdn_commit as kda_commit
from vllm.model_executor.layers.fla.ops.gated_delta_rule.cpu import journal_fields
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode, KdaPrefill

__all__ = ["kda_commit", "kda_decode", "kda_prefill"]

_ops = cpu_ops()
_prefill = _ops.gdn_prefill.default
_decode = _ops.gdn_decode.default
#: of `beta = scale * sigmoid(b)`
_BETA_SCALE = 1.0


def kda_prefill(problem: KdaPrefill) -> None:
    """See `naive.kda_prefill`; token by token, so the chunks are not needed here."""
    _prefill(
        problem.qkv,
        problem.gates.a,
        problem.gates.b,
        problem.gates.A_log,
        problem.gates.dt_bias.flatten(),
        problem.state,
        problem.state_indices,
        problem.has_initial_state,
        problem.query_start_loc,
        *problem.heads,
        problem.out,
        _BETA_SCALE,
    )


def kda_decode(problem: KdaDecode) -> None:
    """See `naive.kda_decode`."""
    _decode(
        problem.qkv,
        problem.gates.a,
        problem.gates.b,
        problem.gates.A_log,
        problem.gates.dt_bias.flatten(),
        problem.conv_weight,
        None,
        problem.conv_state,
        problem.state,
        problem.state_indices,
        *problem.heads,
        problem.out,
        _BETA_SCALE,
        *journal_fields(problem.journal),
    )
