# SPDX-License-Identifier: Apache-2.0
"""Float8 experts: the definition against fp64, the kernels against the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import error_ratio, randn, strided
from tests.kernels.test_fp8 import exact_in_fp8
from vllm.kernels import fp8
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.moe import (
    ClampedSwiglu,
    ExpertScales,
    ExpertsProblem,
    RoutingProblem,
    RoutingRule,
    naive,
    triton,
)

EXPERTS, HIDDEN, INNER = 5, 160, 136
FORMATS = ("rows", "groups")
#: of results whose activation is rounded to float8 after another order of sums: what is near a
#: boundary falls to either side
ROUNDED_AGAIN = 0.005
#: the same after sums of 128 channels that the tensor cores made: of their products they keep some
#: 14 bits, 1/3000 of a result, by which one activation in 250 falls to the other side, which is
#: 1/11 of it on average: sqrt(1/250) / 11 is 0.006. Measured on an H200: 0.005 to 0.008; with sums
#: of 32 channels, which take 30 % longer, 0.003; with sums of 2,048 0.012.
SUMMED_BY_TENSOR_CORES = 0.01


@pytest.fixture(params=["triton", "cpu"])
def kernels(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch
) -> Kernels:
    if request.param == "cpu" and device != "cpu":
        pytest.skip("the CPU's kernels read host memory")
    if request.param == "triton" and device == "cpu":
        # The interpreter rounds to float8 wrongly.
        monkeypatch.setattr(triton, "quantize_rows", fp8.quantize_rows)
        monkeypatch.setattr(triton, "quantize_groups", fp8.quantize_groups)
    made: dict[str, Any] = {"triton": CudaKernels, "cpu": CpuKernels}
    return made[request.param]()


def stack(
    rows: int, channels: int, form: str, device: str, experts: int = EXPERTS
) -> tuple[Tensor, Tensor]:
    """Weights of very different sizes, and their scales: a wrong one is a large error."""
    sizes = torch.logspace(-2, 0, rows)[torch.randperm(rows)][:, None] / channels**0.5
    drawn = randn(experts, rows, channels, dtype=torch.float32, device=device)
    wide = drawn * sizes.to(device)
    matrices, scales = [], []
    for matrix in wide:
        if form == "rows":
            values, scale = fp8.quantize_rows(matrix)
            scale = scale[:, 0]
        else:
            values, scale = fp8.quantize_groups(matrix)
            scale = scale.t()
        matrices.append(values)
        scales.append(scale)
    return torch.stack(matrices), torch.stack(scales).contiguous()


def problem_of(
    tokens: int,
    form: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    sizes: tuple[int, int, int] = (EXPERTS, HIDDEN, INNER),
    slots: int = 3,
    gated: bool = True,
    **fields: Any,
) -> ExpertsProblem:
    experts, hidden, inner = sizes
    logits = randn(tokens, experts, dtype=torch.float32, device=device, scale=2.0)
    routing = naive.route_experts(RoutingProblem(logits, experts, RoutingRule(slots)))
    gate_up, gate_up_scale = stack((1 + gated) * inner, hidden, form, device, experts)
    down, down_scale = stack(hidden, inner, form, device, experts)
    x = exact_in_fp8(tokens, hidden) / 100 if tokens else torch.zeros(0, hidden)
    return ExpertsProblem(
        strided(x.to(dtype).to(device), 16),
        gate_up,
        down,
        routing,
        gated=gated,
        scales=ExpertScales(gate_up_scale, down_scale),
        **fields,
    )


def plain(problem: ExpertsProblem) -> ExpertsProblem:
    """The same numbers in fp64, with nothing made float8 on the way."""
    assert problem.scales is not None
    scales = problem.scales.gate_up, problem.scales.down
    stacks = []
    for weight, scale in zip((problem.gate_up, problem.down), scales, strict=True):
        wide = scale.double().unsqueeze(-1)
        if problem.scales.grouped:
            wide = scale.double().mT.repeat_interleave(fp8.GROUP, 2)[..., : weight.shape[2]]
        stacks.append(weight.double() * wide)
    gate_up, down = stacks
    biases = {
        name: None if bias is None else bias.double()
        for name, bias in (
            ("gate_up_bias", problem.gate_up_bias),
            ("down_bias", problem.down_bias),
        )
    }
    return replace(problem, x=problem.x.double(), gate_up=gate_up, down=down, scales=None, **biases)


@pytest.mark.parametrize("form", FORMATS)
def test_the_definition_is_the_plain_product_but_for_rounding(form: str) -> None:
    """What is exact in float8 is rounded between the products alone, by 1/16 at most."""
    problem = problem_of(40, form, "cpu")
    found = naive.run_experts(problem)
    assert 1e-3 < error_ratio(found, naive.run_experts(plain(problem))) < 0.04


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("tokens", "gated"), [(0, True), (1, True), (29, True), (29, False)])
def test_kernels_follow_the_definition(
    kernels: Kernels, form: str, tokens: int, gated: bool, device: str
) -> None:
    problem = problem_of(tokens, form, device, gated=gated)
    found, expected = kernels.run_experts(problem), naive.run_experts(problem)
    assert found.shape == expected.shape and found.dtype == problem.x.dtype
    if tokens:
        assert error_ratio(found, expected.double()) < ROUNDED_AGAIN


def test_biases_and_clamps(kernels: Kernels, device: str) -> None:
    """Biases are added to what is scaled already."""
    problem = problem_of(
        9,
        "groups",
        device,
        gate_up_bias=randn(EXPERTS, 2 * INNER, dtype=torch.float32, device=device),
        down_bias=randn(EXPERTS, HIDDEN, dtype=torch.float32, device=device),
        clamp=ClampedSwiglu(1.7, 2.0, 1.0),
    )
    found = kernels.run_experts(problem)
    assert error_ratio(found, naive.run_experts(problem).double()) < ROUNDED_AGAIN
    assert error_ratio(found, naive.run_experts(plain(problem))) < 0.04


def test_rows_of_the_cpu_do_not_depend_on_the_batch() -> None:
    for form in FORMATS:
        problem = problem_of(50, form, "cpu")
        routing = type(problem.routing)(*(t[:7] for t in vars(problem.routing).values()))
        part = replace(problem, x=problem.x[:7], routing=routing)
        assert torch.equal(CpuKernels().run_experts(part), CpuKernels().run_experts(problem)[:7])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [1, 8, 64, 600, 5000])
def test_large_experts(tokens: int, form: str) -> None:
    """Of the sizes of Qwen3.5-35B-A3B."""
    problem = problem_of(tokens, form, "cuda", torch.bfloat16, sizes=(257, 2048, 512), slots=9)
    found = CudaKernels().run_experts(problem)
    # Few rows per expert are multiplied by instructions that keep all bits.
    bound = ROUNDED_AGAIN if tokens <= 64 else SUMMED_BY_TENSOR_CORES
    assert error_ratio(found, naive.run_experts(problem).double()) < bound
