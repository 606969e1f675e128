# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on the CPU: all experts in one call of `csrc/cpu/kernels/experts.cpp`."""

from functools import cache

import torch
from torch import Tensor

from vllm._extension import cpu_ops
from vllm.kernels.moe import ExpertsProblem
from vllm.kernels.moe.naive import route_experts
from vllm.kernels.registry import Implementation

__all__ = ["route_experts", "run_experts"]

#: with more pairs per expert, on average, matrix units pay
MOST_PAIRS_WITHOUT_UNITS = 16

_run = cpu_ops().run_experts.default


@cache
def has_matrix_units() -> bool:
    """Whether oneDNN multiplies bfloat16 by units that `vllm_cpu` does not use."""
    return torch.cpu._is_amx_tile_supported()


def takes_experts(problem: ExpertsProblem) -> bool:
    """Whether the kernel takes the problem, and is not left behind by oneDNN."""
    many = MOST_PAIRS_WITHOUT_UNITS * problem.num_experts * problem.ranks
    return problem.scales is None and not (
        problem.x.dtype == torch.bfloat16 and problem.experts.numel() > many and has_matrix_units()
    )


def _run_experts(problem: ExpertsProblem) -> Tensor:
    """See `naive.run_experts`. A row's bits do not depend on the other rows."""
    clamp = problem.clamp
    out: Tensor = _run(
        problem.x,
        problem.gate_up,
        problem.down,
        problem.routing.weights,
        problem.experts,
        problem.shared,
        problem.gate_up_bias,
        problem.down_bias,
        problem.gated,
        None if clamp is None else clamp.alpha,
        None if clamp is None else clamp.limit,
        None if clamp is None else clamp.offset,
    )
    return out


run_experts = Implementation(_run_experts, takes_experts)
