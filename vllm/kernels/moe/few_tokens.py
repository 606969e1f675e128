# SPDX-License-Identifier: Apache-2.0
"""The experts' products of a few tokens on Hopper.

`csrc/cuda/hopper/few_token_experts.cuh` has both products as one kernel, which finds out by itself
which experts are hit: their weights stream through shared memory without a gap, those of the down
projections while the gate's and up projections' are multiplied. What float8 experts are given each
multiprocessor makes float8 by itself. A row's bits follow from that row and the weights alone.
"""

from __future__ import annotations

import torch

from vllm.kernels.cuda_library import CudaOps, overlaps
from vllm.kernels.moe import ExpertScales, ExpertsProblem
from vllm.kernels.moe.hopper import ACCESS_BYTES, is_dense, is_plain_swiglu
from vllm.kernels.moe.slots import SlotOutputs, experts_of_slots
from vllm.utils.math_utils import cdiv

OPS = CudaOps(
    what="products of experts of a few tokens",
    why="the weights of both products are read without a gap, and nothing is sorted in memory",
    instead_of="Triton",
    chosen="vllm_cuda for bfloat16 and float8 SwiGLU without bias or clamp, rows up to 8 KiB, or "
    "what is for more tokens",
)
#: with more, kernels that sort pairs are as fast, in bfloat16 and in float8
MOST_TOKENS, MOST_FLOAT8_TOKENS, MOST_PAIRS = 4, 6, 128
#: of a row of the weights; and what shared memory holds of what is multiplied
MOST_ROW_BYTES, MOST_INPUT_BYTES = 8 << 10, 96 << 10
#: float8 rows are padded to as much
PASS_BYTES = 512


def takes_few_tokens(problem: ExpertsProblem) -> bool:
    """Whether the kernels take the problem, and are faster."""
    x, weights, scales = problem.x, (problem.gate_up, problem.down), problem.scales
    operand = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    most = MOST_TOKENS if scales is None else MOST_FLOAT8_TOKENS
    rows = [weight.shape[2] * operand.itemsize for weight in weights]
    return (
        0 < len(x) <= most
        and is_plain_swiglu(problem)
        and all(weight.dtype == operand and is_dense(weight) for weight in weights)
        and all(row % ACCESS_BYTES == 0 and row <= MOST_ROW_BYTES for row in rows)
        and (scales is None or all(is_dense(scale) for scale in scales.both))
        and problem.experts.numel() <= MOST_PAIRS
        and len(x) * _held(rows[0], scales) + problem.experts.numel() * _held(rows[1], scales)
        <= MOST_INPUT_BYTES
    )


def _held(row_bytes: int, scales: ExpertScales | None) -> int:
    """Bytes that shared memory holds of a row that is multiplied by rows of as many bytes."""
    return row_bytes if scales is None else cdiv(row_bytes, PASS_BYTES) * PASS_BYTES


def _slot_outputs(problem: ExpertsProblem) -> SlotOutputs:
    x, experts = problem.x, problem.experts
    pairs = experts.numel()
    gated, outputs = (x.new_empty(pairs, size) for size in (problem.intermediate, x.shape[1]))
    inner_scale, outer_scale = (None, None) if problem.scales is None else problem.scales.both
    torch.ops.vllm_cuda.few_token_experts.default(
        x, problem.gate_up, problem.down, inner_scale, outer_scale, experts, gated, outputs,
        overlaps(),
    )  # fmt: skip
    return SlotOutputs(problem, outputs)


run_experts, run_experts_add = experts_of_slots(_slot_outputs, takes_few_tokens, OPS)
