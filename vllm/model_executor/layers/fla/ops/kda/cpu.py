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


def kda_prefill(p: KdaPrefill) -> None:
    """See `naive.kda_prefill`; token by token, so the chunks are not needed here."""
    _prefill(
        p.qkv,
        p.gates.a,
        p.gates.b,
        p.gates.A_log,
        p.gates.dt_bias.flatten(),
        p.state,
        p.state_indices,
        p.has_initial_state,
        p.query_start_loc,
        *p.heads,
        p.out,
        _BETA_SCALE,
    )


def kda_decode(p: KdaDecode) -> None:
    """See `naive.kda_decode`."""
    _decode(
        p.qkv,
        p.gates.a,
        p.gates.b,
        p.gates.A_log,
        p.gates.dt_bias.flatten(),
        p.conv_weight,
        None,
        p.conv_state,
        p.state,
        p.state_indices,
        *p.heads,
        p.out,
        _BETA_SCALE,
        *journal_fields(p.journal),
    )
