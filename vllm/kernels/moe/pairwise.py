# SPDX-License-Identifier: Apache-2.0
"""The experts' products of a few tokens on Hopper.

Each pair of token and slot reads its expert by itself (`csrc/cuda/hopper/pairwise_experts.cuh`):
hardly two pairs have the same one, nothing needs sorting, and the down projections' weights are
under way before the gate's and up projections' results are there. A row's bits follow from that row
and the weights alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.kernels.cuda_library import CudaOps, overlaps
from vllm.kernels.moe import ExpertsProblem
from vllm.kernels.moe.hopper import ACCESS_BYTES, is_dense, is_plain_swiglu
from vllm.kernels.moe.slots import SlotOutputs
from vllm.kernels.registry import Implementation
from vllm.kernels.residual_stream import ResidualStream

OPS = CudaOps(
    what="products of experts of 1 and 2 tokens",
    why="nothing is sorted, and weights of both products are under way together",
    instead_of="Triton",
    chosen="vllm_cuda for bfloat16 SwiGLU without bias or clamp, of up to 4096 channels, or what "
    "is for more tokens",
)
#: with more, experts that tokens share are better read once
MOST_TOKENS = 2
#: what shared memory holds: of all tokens, of what is between the products, of a row of weights
MOST_INPUT_BYTES, MOST_GATED_BYTES, MOST_ROW_BYTES = 24 << 10, 48 << 10, 8 << 10


def takes_pairs(problem: ExpertsProblem) -> bool:
    """Whether the kernels take the problem, and are faster."""
    x, weights = problem.x, (problem.gate_up, problem.down)
    widths = x.shape[1], problem.intermediate
    return (
        0 < len(x) <= MOST_TOKENS
        and problem.scales is None
        and is_plain_swiglu(problem)
        and all(2 * width % ACCESS_BYTES == 0 and 2 * width <= MOST_ROW_BYTES for width in widths)
        and all(weight.dtype == x.dtype and is_dense(weight) for weight in weights)
        and 2 * x.numel() <= MOST_INPUT_BYTES
        and 2 * problem.experts.numel() * problem.intermediate <= MOST_GATED_BYTES
    )


def _slot_outputs(problem: ExpertsProblem) -> SlotOutputs:
    x, experts = problem.x, problem.experts
    pairs = experts.numel()
    gated, outputs = (x.new_empty(pairs, size) for size in (problem.intermediate, x.shape[1]))
    torch.ops.vllm_cuda.pairwise_experts.default(
        x, problem.gate_up, problem.down, experts, gated, outputs, overlaps()
    )
    return SlotOutputs(problem, outputs)


def _run_experts(problem: ExpertsProblem) -> Tensor:
    return _slot_outputs(problem).sum()


def _run_experts_add(problem: ExpertsProblem, residual: Tensor) -> ResidualStream:
    return ResidualStream(residual, _slot_outputs(problem))


def _takes_addition(problem: ExpertsProblem, residual: Tensor) -> bool:
    return takes_pairs(problem)


run_experts = Implementation(_run_experts, takes_pairs, OPS)
run_experts_add = Implementation(_run_experts_add, _takes_addition, OPS)
