# SPDX-License-Identifier: Apache-2.0
"""Mixtures on a residual stream in a graph of overlapping launches: the bits of separate ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER
from vllm.kernels.moe import ExpertsProblem, RoutingProblem, RoutingRule
from vllm.kernels.moe.slots import SlotOutputs
from vllm.kernels.residual_stream import Norm, ResidualStream

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INNER = 24, 1024, 128


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the kernels hold machine code of compute capability 9.0")
    torch.manual_seed(0)


class SeparateKernels(CudaKernels):
    """The same products; sums are launches of their own."""

    def run_experts_add(self, problem: ExpertsProblem, residual: Tensor) -> ResidualStream:
        return ResidualStream(residual, self.run_experts(problem))


def rows(*shape: int) -> Tensor:
    return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).to(BF16)


def layers(kernels: CudaKernels, weights: list[tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
    """Layers of a projection and a mixture; every sum, and the last norm."""
    stream, sums = ResidualStream(x), []
    rule = RoutingRule(4)
    for scale, project, router, gate_up, down in weights:
        norm = Norm(scale, 1e-6, True)
        hidden, total = kernels.norm_linear(stream, norm, project, None)
        stream = kernels.linear_add(hidden, project, None, total)
        normed, middle = kernels.enter(stream, norm)
        logits = kernels.linear(normed, router, None)
        routing = kernels.route_experts(RoutingProblem(logits, EXPERTS - 1, rule, shared="gated"))
        problem = ExpertsProblem(normed, gate_up, down, routing)
        stream = kernels.run_experts_add(problem, middle)
        sums += [total, middle]
    return [*sums, *kernels.enter(stream, norm)]


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 40, 300])
def test_streams_of_a_graph_have_the_bits_of_separate_kernels(tokens: int) -> None:
    weights: list[tuple[Tensor, ...]] = [
        (
            rows(HIDDEN),
            rows(HIDDEN, HIDDEN),
            rows(EXPERTS, HIDDEN),
            rows(EXPERTS, 2 * INNER, HIDDEN),
            rows(EXPERTS, HIDDEN, INNER),
        )
        for _ in range(4)
    ]
    x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)
    expected = layers(SeparateKernels(HOPPER), weights, x)
    kernels = CudaKernels(HOPPER)
    eager = layers(kernels, weights, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layers(kernels, weights, x)
    for _ in range(10):
        for total in replayed[1:]:
            total.fill_(float("nan"))
        graph.replay()
        for a, b, c in zip(replayed, eager, expected, strict=True):
            assert torch.equal(a, c) and torch.equal(b, c)


def test_slots_are_left_to_the_norm() -> None:
    kernels = CudaKernels(HOPPER)
    gate_up, down = rows(EXPERTS, 2 * INNER, HIDDEN), rows(EXPERTS, HIDDEN, INNER)
    for tokens in (1, 5):
        x, logits = rows(tokens, HIDDEN), rows(tokens, EXPERTS)
        routing = kernels.route_experts(RoutingProblem(logits, EXPERTS, RoutingRule(2)))
        stream = kernels.run_experts_add(ExpertsProblem(x, gate_up, down, routing), x)
        assert stream.residual is x and isinstance(stream.branch, SlotOutputs)
