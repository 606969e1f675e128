# SPDX-License-Identifier: Apache-2.0
"""Experts with biases and a clamped activation, on every platform."""

from __future__ import annotations

from dataclasses import asdict, astuple, replace

import pytest
import torch

from tests.kernels.cases import TOLERANCE, check, error_ratio, randn, strided
from tests.kernels.test_moe import experts_problem, wide
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.moe import ClampedSwiglu, ExpertsProblem, naive
from vllm.kernels.naive import NaiveKernels

#: gpt-oss's, and DeepSeek-V4's
CLAMPS = (ClampedSwiglu(1.702, 1.5, 1.0), ClampedSwiglu(1.0, 1.5, 0.0))
clamped = pytest.mark.parametrize("clamp", CLAMPS, ids=["offset", "plain"])


def biased(tokens: int, dtype: torch.dtype, device: str, clamp: ClampedSwiglu) -> ExpertsProblem:
    problem = experts_problem(tokens, device, dtype)
    experts, width, hidden = problem.gate_up.shape
    return replace(
        problem,
        gate_up_bias=randn(experts, width, dtype=dtype, device=device),
        down_bias=randn(experts, hidden, dtype=dtype, device=device),
        clamp=clamp,
    )


@clamped
def test_definition(clamp: ClampedSwiglu) -> None:
    gate, up = torch.randn(2, 3, 4, dtype=torch.float64) * 3
    held, straight = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    expected = held / (1 + (-clamp.alpha * held).exp()) * (straight + clamp.offset)
    found = NaiveKernels().clamped_swiglu(torch.cat([gate, up], dim=1), *astuple(clamp))
    assert error_ratio(found, expected) < 1e-14
    problem = biased(1, torch.float64, "cpu", clamp)
    assert problem.gate_up_bias is not None and problem.down_bias is not None
    total = torch.zeros(problem.x.shape[1], dtype=torch.float64)
    pairs = zip(problem.routing.weights[0], problem.routing.experts[0].tolist(), strict=True)
    for weight, expert in pairs:
        hidden = problem.gate_up[expert] @ problem.x[0] + problem.gate_up_bias[expert]
        gated = NaiveKernels().clamped_swiglu(hidden[None], *astuple(clamp))[0]
        total += weight * (problem.down[expert] @ gated + problem.down_bias[expert])
    assert error_ratio(naive.run_experts(problem)[0], total) < 1e-14


@clamped
@pytest.mark.parametrize("tokens", [1, 37])
def test_cpu(tokens: int, clamp: ClampedSwiglu) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        problem = biased(tokens, dtype, "cpu", clamp)
        found, expected = CpuKernels().run_experts(problem), naive.run_experts(wide(problem))
        assert error_ratio(found, expected) < 2 * TOLERANCE[dtype]


@clamped
@pytest.mark.parametrize("tokens", [1, 37])
def test_triton(tokens: int, dtype: torch.dtype, device: str, clamp: ClampedSwiglu) -> None:
    problem = biased(tokens, dtype, device, clamp)
    found, expected = CudaKernels().run_experts(problem), naive.run_experts(wide(problem))
    assert error_ratio(found, expected) < 2 * TOLERANCE[dtype]


@clamped
@pytest.mark.parametrize("kernels", [CpuKernels(), CudaKernels()], ids=["cpu", "triton"])
def test_activation(kernels: Kernels, device: str, clamp: ClampedSwiglu) -> None:
    if device == "cuda" and isinstance(kernels, CpuKernels):
        pytest.skip("one machine's kernels")
    gate_up = strided(randn(5, 80, dtype=torch.float32, device=device, scale=4.0))
    case = dict(gate_up=gate_up, **asdict(clamp))
    check(kernels, "clamped_swiglu", case, TOLERANCE[torch.float32])
