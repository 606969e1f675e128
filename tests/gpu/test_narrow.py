# SPDX-License-Identifier: Apache-2.0
"""The CUDA C++ matmul of 9 to 64 tokens against fp64, row by row, and in graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.test_skinny import into_nan
from tests.kernels.cases import TOLERANCE, error_ratio
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER
from vllm.kernels.linear.narrow import (
    LEAST_ELEMENTS,
    OPS,
    is_narrow,
    narrow_linear,
    narrow_silu_and_mul,
)
from vllm.kernels.residual_stream import Norm, ResidualStream

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: [n, k] of Qwen3.5-4B, 9B and 35B-A3B
SHAPES = [
    (18432, 2560),
    (12352, 2560),
    (2560, 9216),
    (2560, 4096),
    (4096, 12288),
    (2048, 4096),
    (264, 2048),
]
#: with columns that are no whole stages, and few rows
RAGGED = [(32, 64), (1072, 544), (208, 1096), (8192, 200)]
TOKENS = (9, 16, 17, 24, 31, 32, 33, 48, 63, 64)
KB = 1024
#: rows of a tile, CTAs that share out its columns
CUTS = [(96, 1), (256, 1), (208, 1), (16, 1), (144, 2), (80, 4), (176, 8)]


@pytest.fixture(scope="module", autouse=True)
def _ops() -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the kernel is compiled for compute capability 9.0")
    assert OPS.choose(HOPPER), "build the CUDA ops first"


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def rows(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


def amid_nan(matrix: Tensor) -> Tensor:
    """A copy with NaN columns beside it and NaN rows before and after it."""
    m, k = matrix.shape
    wide = torch.full((m + 16, k + 8), float("nan"), dtype=BF16, device="cuda")
    wide[8:-8, :k] = matrix
    return wide[8:-8, :k]


def weight_of(n: int, k: int) -> Tensor:
    """Dense rows amid NaN rows."""
    padded = torch.full((n + 16, k), float("nan"), dtype=BF16, device="cuda")
    padded[8:-8] = rows(n, k, scale=k**-0.5)
    return padded[8:-8]


def launched(
    x: Tensor,
    weight: Tensor,
    cut: tuple[int, int],
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    token_bytes: int = 32 * KB,
    shared_bytes: int = 200 * KB,
) -> Tensor:
    out: Tensor = torch.ops.vllm_cuda.narrow_linear.default(
        x, weight, bias, residual, gated, False, *cut, token_bytes, shared_bytes
    )
    return out


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_fp64(n: int, k: int) -> None:
    weight, bias, triton = weight_of(n, k), rows(n), CudaKernels()
    for m in TOKENS:
        x = amid_nan(rows(m, k))
        assert is_narrow(x, weight, bias) == (m > 16 or n * k >= LEAST_ELEMENTS)
        out = into_nan(lambda: narrow_linear(x, weight, None, False), m, n, BF16)  # noqa: B023
        expected = x.double() @ weight.double().T
        assert error_ratio(out, expected) < TOLERANCE[BF16]
        biased = narrow_linear(x, weight, bias, False)
        assert error_ratio(biased, expected + bias.double()) < TOLERANCE[BF16]
        residual = rows(m, n, scale=3.0)
        added = narrow_linear(x, weight, bias, False, residual=residual)
        assert torch.equal(added, residual + biased)
        if is_narrow(x, weight, bias, gated=True):
            gated = narrow_silu_and_mul(x, weight, bias, False)
            assert torch.equal(gated, triton.silu_and_mul(biased))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("n", "k"), RAGGED)
def test_every_cut_on_ragged_sizes(n: int, k: int, cut: tuple[int, int]) -> None:
    weight, bias, triton = weight_of(n, k), rows(n), CudaKernels()
    for m in (1, 17, 32, 40, 64):
        x, residual = amid_nan(rows(m, k)), rows(m, n)
        out = into_nan(lambda: launched(x, weight, cut), m, n, BF16)  # noqa: B023
        assert error_ratio(out, x.double() @ weight.double().T) < TOLERANCE[BF16]
        assert torch.equal(launched(x, weight, cut, residual=residual), residual + out)
        biased = launched(x, weight, cut, bias=bias)
        gated = into_nan(lambda: launched(x, weight, cut, bias=bias, gated=True), m, n // 2, BF16)  # noqa: B023
        assert torch.equal(gated, triton.silu_and_mul(biased))


@pytest.mark.parametrize(("n", "k"), [(2560, 9216), (12352, 2560)])
def test_a_row_does_not_depend_on_the_rows_beside_it(n: int, k: int) -> None:
    x, weight = rows(64, k), weight_of(n, k)
    whole, gated = (
        narrow_linear(x, weight, None, False),
        narrow_silu_and_mul(x, weight, None, False),
    )
    for m in (9, 16, 18, 25, 32, 33, 41, 63):
        assert torch.equal(narrow_linear(x[64 - m :], weight, None, False), whole[64 - m :])
        assert torch.equal(narrow_silu_and_mul(x[:m], weight, None, False), gated[:m])


def layers(kernels: CudaKernels, weights: list[tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
    """Layers of an input and an output projection and a feed-forward network; every sum."""
    stream, sums, norm = ResidualStream(x), [], Norm(weights[0][0][0], 1e-6, True)
    for up, down, gate_up, out in weights:
        hidden, total = kernels.norm_linear(stream, norm, up, None)
        stream = kernels.linear_add(hidden, down, None, total)
        hidden, middle = kernels.norm_linear_silu_and_mul(stream, norm, gate_up, None)
        stream = kernels.linear_add(hidden, out, None, middle)
        assert stream.branch is None
        sums += [total, middle]
    return [*sums, stream.residual]


@pytest.mark.parametrize("m", [9, 32, 64])
def test_overlapping_launches_of_a_graph_give_the_serial_bits(m: int) -> None:
    shapes = (12352, 2560), (2560, 12352), (18432, 2560), (2560, 9216)
    weights = [tuple(weight_of(n, k) for n, k in shapes) for _ in range(6)]
    x, kernels = rows(m, 2560), CudaKernels(HOPPER)
    expected = layers(kernels, weights, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layers(kernels, weights, x)
    for _ in range(30):
        for total in replayed[1:]:
            total.fill_(float("nan"))
        graph.replay()
        for a, b in zip(replayed, expected, strict=True):
            assert torch.equal(a, b)


REFUSED: list[tuple[Callable[[Tensor, Tensor], object], str]] = [
    (lambda x, w: launched(rows(65, 2560), w, CUTS[0]), "x must be at most 64"),
    (lambda x, w: launched(x.half(), w, CUTS[0]), "x must be at most 64 bfloat16"),
    (lambda x, w: launched(rows(32, 2564)[:, :2560], w, CUTS[0]), "16-byte aligned"),
    (lambda x, w: launched(x[:, :2552].contiguous(), w, CUTS[0]), "k that of x"),
    (lambda x, w: launched(x, w[:2556], CUTS[0]), "n of 8"),
    (lambda x, w: launched(x, w[:2552], CUTS[0], gated=True), "n of 8 or, gated, of 16"),
    (lambda x, w: launched(x, w, CUTS[0], bias=w[0, :8]), "bias must be dense"),
    (lambda x, w: launched(x, w, CUTS[0], residual=x[:31]), "residual must be dense"),
    (lambda x, w: launched(x, w, CUTS[0], residual=x, gated=True), "residual must be dense"),
    (lambda x, w: launched(x, w, (264, 1)), "8 to 256 rows"),
    (lambda x, w: launched(x, w, (40, 1), gated=True), "in groups of 8 or, gated, of 16"),
    (lambda x, w: launched(x, w, (96, 3)), "1, 2, 4 or 8 CTAs"),
    (lambda x, w: launched(x, w, CUTS[0], token_bytes=8000), "two stages of tokens"),
    (lambda x, w: launched(x, w, CUTS[0], shared_bytes=50_000), "two stages of the weight"),
    (lambda x, w: launched(x, w, CUTS[0], shared_bytes=228 * KB), "more than 227 KB"),
    (lambda x, w: launched(x, w, CUTS[0], shared_bytes=-1), "no cut"),
]


@pytest.mark.parametrize(("call", "why"), REFUSED)
def test_what_the_kernel_cannot_do_is_refused(
    call: Callable[[Tensor, Tensor], object], why: str
) -> None:
    with pytest.raises(RuntimeError, match=why):
        call(rows(32, 2560), weight_of(2560, 2560))
