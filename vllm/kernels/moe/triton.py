# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on GPUs: sorting, two products, one sum.

Grids follow from the numbers of tokens and experts alone, and nothing reads the device, so a
captured graph holds whatever the routing is. Memory errors cannot come from a routing: experts and
pairs that do not exist are skipped. A row's bits follow from that row, the weights, and how many
tokens there are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.kernels.fp8 import GROUP
from vllm.kernels.fp8.quantize import quantize_groups, quantize_rows
from vllm.kernels.moe import ExpertScales, ExpertsProblem
from vllm.kernels.moe.blocks import Blocks, sort_into_blocks
from vllm.kernels.moe.products import down, gate_up
from vllm.kernels.moe.route import route_experts
from vllm.kernels.moe.slots import SlotOutputs
from vllm.kernels.residual_stream import ResidualStream
from vllm.kernels.triton.configs import Configs, Tile, device_configs
from vllm.kernels.triton.dependent_launch import dependent_launch
from vllm.utils.math_utils import cdiv

__all__ = ["Operand", "make_operand", "route_experts", "run_experts", "run_experts_add"]


def block_rows(num_pairs: int, num_experts: int, configs: Configs) -> int:
    """Rows of a block: the fewest that hold an expert's mean share, up to the most there are."""
    heights = sorted(configs.moe_gate_up)
    return next((rows for rows in heights if rows * num_experts >= num_pairs), heights[-1])


def run_experts(problem: ExpertsProblem) -> Tensor:
    """See `naive.run_experts`."""
    return _slot_outputs(problem).sum()


def run_experts_add(problem: ExpertsProblem, residual: Tensor) -> ResidualStream:
    """See `Kernels.run_experts_add`."""
    return ResidualStream(residual, _slot_outputs(problem))


def _slot_outputs(problem: ExpertsProblem) -> SlotOutputs:
    x, experts = problem.x, problem.experts
    tokens, slots = experts.shape
    hidden, inner = x.shape[1], problem.intermediate
    if tokens == 0:
        return SlotOutputs(problem, x)
    configs, pdl = device_configs(x.device), dependent_launch(x.device)
    num_pairs = tokens * slots
    rows = block_rows(num_pairs, problem.num_experts * problem.ranks, configs)
    if tokens == 1:
        # Its experts differ: they are the blocks.
        blocks = Blocks(rows, slots, experts, experts, experts)
    else:
        blocks = sort_into_blocks(experts, problem.num_experts, rows)
    place = (blocks.pairs, blocks.experts, blocks.ends, num_pairs)
    constants = {"EXPERTS": problem.num_experts, "SORTED": tokens > 1, "ROWS": rows, **pdl}

    scales = problem.scales
    inner_scale, outer_scale = (None, None) if scales is None else scales.both
    constants |= {"SCALED": scales is not None, "GROUP_K": GROUP if _grouped(scales) else 0}

    wide = x.dtype == torch.float32 and scales is None
    tile = configs.moe_fp32 if wide else configs.moe_gate_up[rows]
    gated = torch.empty(blocks.count * rows, inner, dtype=x.dtype, device=x.device)
    operand = make_operand(x, scales)
    gate_up[(blocks.count * cdiv(inner, tile.columns),)](
        operand.values, operand.scale, problem.gate_up, inner_scale,
        problem.gate_up_bias, gated, *place, operand.values.stride(0), *operand.scale_strides,
        K=hidden, N=inner, SLOTS=slots, GATED=problem.gated, **_activation(problem),
        **_launch(tile, scales), **constants,
    )  # fmt: skip

    tile = configs.moe_fp32 if wide else configs.moe_down[rows]
    outputs = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
    operand = make_operand(gated, scales)
    down[(blocks.count * cdiv(hidden, tile.columns),)](
        operand.values, operand.scale, problem.down, outer_scale,
        problem.down_bias, outputs, *place, *operand.scale_strides,
        K=inner, N=hidden, BIAS=problem.down_bias is not None,
        **_launch(tile, scales), **constants,
    )  # fmt: skip

    return SlotOutputs(problem, outputs)


@dataclass(frozen=True)
class Operand:
    """What is multiplied by experts: `values [rows, channels]` and, if float8, their scales, one
    per row or `[rows, groups]`."""

    values: Tensor
    scale: Tensor | None

    @property
    def scale_strides(self) -> tuple[int, int]:
        return (0, 0) if self.scale is None else (self.scale.stride(0), self.scale.stride(1))


def make_operand(x: Tensor, scales: ExpertScales | None) -> Operand:
    """`x`, made float8 as the stacks are."""
    if scales is None:
        return Operand(x, None)
    return Operand(*(quantize_groups if scales.grouped else quantize_rows)(x))


def _grouped(scales: ExpertScales | None) -> bool:
    return scales is not None and scales.grouped


def _activation(problem: ExpertsProblem) -> dict[str, bool | float]:
    clamp = problem.clamp
    return {
        "BIAS": problem.gate_up_bias is not None,
        "CLAMPED": clamp is not None,
        "ALPHA": 1.0 if clamp is None else clamp.alpha,
        "LIMIT": 0.0 if clamp is None else clamp.limit,
        "OFFSET": 0.0 if clamp is None else clamp.offset,
    }


def _launch(tile: Tile, scales: ExpertScales | None) -> dict[str, int]:
    return {
        # A group's channels have one scale; and 128 of them are the bytes of 64 in 16 bits.
        "BLOCK_K": tile.rows if scales is None else GROUP,
        "BLOCK_N": tile.columns,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
