# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on the CPU: the experts that are hit, one after another."""

from dataclasses import astuple

import torch
from torch import Tensor

from vllm import decisions
from vllm.kernels.activation.cpu import clamped_swiglu, silu_and_mul
from vllm.kernels.activation.naive import relu_squared
from vllm.kernels.fp8.cpu import linear_fp8, linear_fp8_block
from vllm.kernels.linear.cpu import linear, skinny_linear
from vllm.kernels.moe import ExpertMatrix, ExpertsProblem
from vllm.kernels.moe.naive import add_slots

#: why the kernel of all experts leaves a problem to this module
FLOAT8 = "the kernel of all experts takes float32, bfloat16 and float16 weights"
MATRIX_UNITS = "oneDNN multiplies many tokens in bfloat16 by the CPU's matrix units (AMX)"


def run_experts(problem: ExpertsProblem) -> Tensor:
    """See `naive.run_experts`. In fp32 a row's bits do not depend on the other rows."""
    decisions.record(
        "mixtures of experts on the CPU",
        "torch over the experts that are hit",
        MATRIX_UNITS if problem.scales is None else FLOAT8,
        instead_of="vllm_cpu",
    )
    x, experts = problem.x, problem.experts
    outputs = x.new_zeros(*experts.shape, x.shape[1])
    rows = outputs.view(-1, x.shape[1])
    order = experts.flatten().sort(dim=0, stable=True)
    hit, counts = order.values.unique_consecutive(return_counts=True)
    pairs = order.indices.split(counts.tolist())
    for expert, pair in zip(hit.tolist(), pairs, strict=True):
        if not problem.has(expert):
            continue
        token = pair // experts.shape[1]
        inner, outer = problem.matrices(expert)
        hidden = _product(x[token], inner)
        if not problem.gated:
            active = relu_squared(hidden)
        elif problem.clamp is None:
            active = silu_and_mul(hidden)
        else:
            active = clamped_swiglu(hidden, *astuple(problem.clamp))
        rows[pair] = _product(active, outer)
    return add_slots(problem, outputs)


def _product(x: Tensor, matrix: ExpertMatrix) -> Tensor:
    if matrix.scale is not None:
        multiply = linear_fp8 if matrix.scale.dim() == 1 else linear_fp8_block
        return multiply(x, matrix.weight, matrix.scale, matrix.bias)
    # Always the same kernel for fp32: how many rows an expert gets depends on the whole batch.
    plain = skinny_linear if x.dtype == torch.float32 else linear
    return plain(x, matrix.weight, matrix.bias)
