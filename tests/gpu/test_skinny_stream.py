# SPDX-License-Identifier: Apache-2.0
"""Norm and addition as parts of the matmul of few tokens: the bits of the separate kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER
from vllm.kernels.linear.skinny import OPS, skinny_linear, skinny_silu_and_mul
from vllm.kernels.residual_stream import Norm, ResidualStream

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: columns whose Triton norm has one, two and two more widely spaced groups to a thread
COLUMNS = (544, 1024, 1056, 2048, 2080, 2560, 3072)


@pytest.fixture(scope="module", autouse=True)
def _ops() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")
    found = OPS.choose(torch.cuda.get_device_capability())
    assert found, "build the CUDA ops first"


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def rows(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def norm_of(k: int, one_plus: bool = True, dtype: torch.dtype = BF16) -> Norm:
    return Norm(rows(k, dtype=dtype, scale=0.3), 1e-6, one_plus)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("k", COLUMNS)
def test_norm_bits(k: int, one_plus: bool, dtype: torch.dtype) -> None:
    weight, norm = rows(1058, k, dtype=dtype, scale=k**-0.5), norm_of(k, one_plus, dtype)
    triton = CudaKernels()
    for m in range(1, 9):
        x = rows(m, k, dtype=dtype, scale=10.0)
        normed = triton.rms_norm(x, norm.weight, norm.eps, one_plus=one_plus)
        out = skinny_linear(x, weight, None, False, norm=norm)
        assert torch.equal(out, skinny_linear(normed, weight, None, False))
        gated = skinny_silu_and_mul(x, weight, None, False, norm=norm)
        assert torch.equal(gated, skinny_silu_and_mul(normed, weight, None, False))
        wide = torch.full((m, k + 8), float("nan"), dtype=dtype, device="cuda")
        wide[:, :k] = x
        assert torch.equal(out, skinny_linear(wide[:, :k], weight, None, False, norm=norm))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(2560, 9216), (2560, 4096), (1058, 544), (4096, 2560)])
def test_addition_bits(n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias = rows(n, k, dtype=dtype, scale=k**-0.5), rows(n, dtype=dtype)
    for m in range(1, 17):
        x, residual = rows(m, k, dtype=dtype), rows(m, n, dtype=dtype, scale=3.0)
        out = skinny_linear(x, weight, bias, False, residual=residual)
        assert torch.equal(out, residual + skinny_linear(x, weight, bias, False))


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight, norm = rows(8, 2560), rows(512, 2560, scale=0.02), norm_of(2560)
    whole = skinny_linear(x, weight, None, False, norm=norm)
    for m in range(1, 8):
        assert torch.equal(
            skinny_linear(x[8 - m :], weight, None, False, norm=norm), whole[8 - m :]
        )


def layers(kernels: CudaKernels, weights: list[tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
    """Layers of an input and an output projection and a feed-forward network; every sum."""
    stream, sums, norm = ResidualStream(x), [], Norm(weights[0][0][0], 1e-6, True)
    for up, down, gate_up, out in weights:
        hidden, total = kernels.norm_linear(stream, norm, up, None)
        stream = kernels.linear_add(hidden, down, None, total)
        hidden, middle = kernels.norm_linear_silu_and_mul(stream, norm, gate_up, None)
        stream = kernels.linear_add(hidden, out, None, middle)
        sums += [total, middle]
    return [*sums, kernels.norm_linear(stream, norm, weights[0][0], None)[1]]


class SeparateKernels(CudaKernels):
    """The same matmuls with the addition left to a norm of its own."""

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> ResidualStream:
        return ResidualStream(residual, self.linear(x, weight, bias))


@pytest.mark.parametrize("m", [1, 8, 16])
def test_streams_of_a_graph_have_the_bits_of_separate_kernels(m: int) -> None:
    """With launches that overlap."""
    shapes = (4096, 2560), (2560, 4096), (2 * 4608, 2560), (2560, 4608)
    weights = [tuple(rows(*s, scale=s[1] ** -0.5) for s in shapes) for _ in range(6)]
    x = rows(m, 2560)
    expected = layers(SeparateKernels(HOPPER), weights, x)
    kernels = CudaKernels(HOPPER)
    eager = layers(kernels, weights, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layers(kernels, weights, x)
    for _ in range(20):
        for total in replayed[1:]:
            total.fill_(float("nan"))
        graph.replay()
        for a, b, c in zip(replayed, eager, expected, strict=True):
            assert torch.equal(a, c) and torch.equal(b, c)
