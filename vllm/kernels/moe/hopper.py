# SPDX-License-Identifier: Apache-2.0
"""The experts' products on Hopper: weights stream through shared memory without a gap.

`csrc/cuda/hopper/experts.cuh` has both products as persistent kernels over the blocks of
`sort_into_blocks`. A multiprocessor goes from tile to tile while the next stages are on their way,
so few tokens per expert take about as long as reading the experts that are hit; of a block only the
places that are used are multiplied, so blocks may be high. High ones are shared by two
multiprocessors, which fetch each weight once for both. k is summed in order whatever the tile, so
a row's bits follow from that row and the weights alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.kernels.cuda_library import CudaOps, overlaps
from vllm.kernels.moe import ExpertsProblem
from vllm.kernels.moe.blocks import Blocks, most_blocks
from vllm.kernels.moe.slots import SlotOutputs, experts_of_slots
from vllm.kernels.moe.triton import make_operand

OPS = CudaOps(
    what="products of experts",
    why="the weights of the experts that are hit are read at the memory's speed",
    instead_of="Triton",
    chosen="vllm_cuda for several tokens' bfloat16 and float8 SwiGLU without bias or clamp, Triton "
    "for others, as those of gpt-oss and DeepSeek-V4",
)
#: places of a block where experts get few tokens, and more
FEW, SOME, MANY = 64, 128, 320
#: up to so many pairs per expert, on average, are few, and some; more share weights, in bfloat16
MOST_FEW, MOST_SOME = 32, 160
#: with fewer there are too few tiles for all multiprocessors
LEAST_TOKENS = 2
#: as many can be sorted
MOST_EXPERTS = 1024
#: bytes of a row that one stage holds, which divide rows; and of one access
STAGE_BYTES, ACCESS_BYTES = 128, 16


def block_height(num_pairs: int, num_experts: int, scaled: bool) -> int:
    """Places of a block; `scaled`: of float8 experts."""
    if num_pairs <= MOST_FEW * num_experts:
        return FEW
    return SOME if scaled or num_pairs <= MOST_SOME * num_experts else MANY


def _height_of(problem: ExpertsProblem) -> int:
    experts = problem.num_experts * problem.ranks
    return block_height(problem.experts.numel(), experts, problem.scales is not None)


def is_dense(tensor: Tensor) -> bool:
    """Whether accesses find what they read one after the other."""
    return tensor.is_contiguous() and _is_aligned(tensor.storage_offset(), tensor)


def is_plain_swiglu(problem: ExpertsProblem) -> bool:
    """Of bfloat16 tokens whose rows are aligned, without clamps or biases."""
    x = problem.x
    return (
        problem.gated
        and problem.clamp is None
        and problem.gate_up_bias is None
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and _is_aligned(x.stride(0), x)
        and _is_aligned(x.storage_offset(), x)
    )


def _is_aligned(elements: int | torch.SymInt, of: Tensor) -> bool:
    return int(elements) * of.element_size() % ACCESS_BYTES == 0


def takes_experts(problem: ExpertsProblem) -> bool:
    """Whether the kernels take the problem, and are faster."""
    x, scales = problem.x, problem.scales
    weights = (problem.gate_up, problem.down)
    operand = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    columns = STAGE_BYTES // operand.itemsize
    return (
        len(x) >= LEAST_TOKENS
        and problem.num_experts <= MOST_EXPERTS
        and is_plain_swiglu(problem)
        and all(weight.dtype == operand and is_dense(weight) for weight in weights)
        and all(weight.shape[2] % columns == 0 for weight in weights)
        and (scales is None or all(is_dense(scale) for scale in scales.both))
        # Scales of whole rows cost Triton less.
        and (scales is None or scales.grouped or _height_of(problem) > FEW)
    )


def sort_into_blocks(experts: Tensor, num_experts: int, height: int) -> Blocks:
    """See `vllm.kernels.moe.blocks.sort_into_blocks`; one launch."""
    count = most_blocks(experts.numel(), num_experts, height)
    pairs, block_experts, ends = (
        experts.new_empty(size) for size in (count * height, count, num_experts)
    )
    torch.ops.vllm_cuda.expert_blocks.default(
        experts, pairs, block_experts, ends, height, overlaps()
    )
    return Blocks(height, count, pairs, block_experts, ends)


def _slot_outputs(problem: ExpertsProblem) -> SlotOutputs:
    x, experts = problem.x, problem.experts
    tokens, slots = experts.shape
    height = _height_of(problem)
    blocks = sort_into_blocks(experts, problem.num_experts, height)
    places = (blocks.pairs, blocks.experts, blocks.ends)
    inner_scale, outer_scale = (None, None) if problem.scales is None else problem.scales.both
    multiply = torch.ops.vllm_cuda.expert_products.default

    num_pairs = tokens * slots
    gated = x.new_empty(num_pairs, problem.intermediate)
    operand = make_operand(x, problem.scales)
    multiply(
        operand.values, problem.gate_up, operand.scale, inner_scale, *places, gated,
        slots, height, True, overlaps(),
    )  # fmt: skip
    outputs = x.new_empty(num_pairs, x.shape[1])
    operand = make_operand(gated, problem.scales)
    multiply(
        operand.values, problem.down, operand.scale, outer_scale, *places, outputs,
        1, height, False, overlaps(),
    )  # fmt: skip
    return SlotOutputs(problem, outputs)


run_experts, run_experts_add = experts_of_slots(_slot_outputs, takes_experts, OPS)
