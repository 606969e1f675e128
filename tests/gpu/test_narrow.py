# SPDX-License-Identifier: Apache-2.0
"""The CUDA C++ matmul of 17 to 256 tokens against fp64 and cuBLAS, in graphs, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCE, error_ratio
from vllm.kernels.linear_ops import LinearOps
from vllm.kernels.narrow import HopperNarrowOps, find_narrow_ops
from vllm.kernels.narrow_cuts import CUTS, narrow_cut

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: [n, k] of Qwen3.5-4B
SHAPES = [(2560, 9216), (2560, 4096)]
TOKENS = (17, 24, 32, 48, 63, 64, 65, 96, 127, 128, 192, 255, 256)


@pytest.fixture(scope="module")
def ops() -> Iterator[LinearOps]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is compiled for compute capability 9.0")
    found = find_narrow_ops(torch.cuda.get_device_capability())
    assert found is not None, "build the CUDA ops first"
    yield found


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def rows(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


def between_nan(matrix: Tensor) -> Tensor:
    """A copy amid NaN: columns beside it and rows before and after it."""
    m, k = matrix.shape
    wide = torch.full((m + 4, k + 8), float("nan"), dtype=BF16, device="cuda")
    wide[2:-2, :k] = matrix
    return wide[2:-2, :k]


def launched(
    x: Tensor, weight: Tensor, cut: int, residual: Tensor | None = None, overlap: bool = False
) -> Tensor:
    out: Tensor = torch.ops.vllm_cuda.narrow_linear.default(x, weight, residual, overlap, cut)
    return out


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_errors_are_those_of_cublas(ops: LinearOps, n: int, k: int) -> None:
    weight, taken = rows(n, k, scale=k**-0.5), 0
    for m in TOKENS:
        if narrow_cut(m, n, k) is None:
            continue
        x = rows(m, k)
        expected = x.double() @ weight.double().T
        theirs = error_ratio(torch.nn.functional.linear(x, weight), expected)
        out = ops.linear(between_nan(x), weight, False)
        assert out.shape == (m, n) and error_ratio(out, expected) < 1.005 * theirs
        taken += 1
    assert taken >= 6


def test_the_cuts_fit_on_this_gpu(ops: LinearOps) -> None:
    """As everywhere that they were chosen for; elsewhere the times are not those of the tables."""
    for i, cut in enumerate(CUTS):
        assert torch.ops.vllm_cuda.narrow_linear_clusters(i, 0) >= cut.clusters
        x, weight = rows(cut.most_tokens, 9216), rows(2560, 9216)
        assert ops.takes(x, weight, None) and not ops.takes(x, weight, rows(2560))


@pytest.mark.parametrize(("n", "k"), [(2560, 1024), (200, 576), (8, 512), (1032, 1600)])
@pytest.mark.parametrize("cut", range(len(CUTS)))
def test_every_cut_on_ragged_sizes(ops: LinearOps, cut: int, n: int, k: int) -> None:
    padded = rows(n + 16, k, scale=k**-0.5)
    padded[:8], padded[-8:] = float("nan"), float("nan")
    weight = padded[8:-8]
    for m in (1, 17, 65, 130, 300, 600):
        x, residual = rows(m, k), rows(m, n)
        wide = between_nan(x)
        poison = torch.full((m, n), float("nan"), dtype=BF16, device="cuda")
        address = poison.data_ptr()
        del poison
        out = launched(wide, weight, cut)
        assert out.data_ptr() == address, "not written over NaN"
        assert error_ratio(out, x.double() @ weight.double().T) < TOLERANCE[BF16]
        assert torch.equal(launched(x, weight, cut, residual), residual + out)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_addition_bits(ops: LinearOps, n: int, k: int) -> None:
    weight = rows(n, k, scale=k**-0.5)
    for m in TOKENS:
        if narrow_cut(m, n, k) is None:
            continue
        x, residual = rows(m, k), rows(m, n, scale=3.0)
        out = ops.linear(x, weight, False, residual=residual)
        assert torch.equal(out, residual + ops.linear(x, weight, False))


@pytest.mark.parametrize("cut", range(len(CUTS)))
def test_a_row_does_not_depend_on_the_rows_beside_it(ops: LinearOps, cut: int) -> None:
    x, weight = rows(512, 4096), rows(2560, 4096, scale=4096**-0.5)
    whole = launched(x, weight, cut)
    for m in (17, 100, 256, 511):
        assert torch.equal(launched(x[:m], weight, cut), whole[:m])
        assert torch.equal(launched(x[-m:], weight, cut), whole[-m:])


def chain(ops: LinearOps, x: Tensor, weights: list[Tensor], overlap: bool) -> Tensor:
    """Each result is the next one's residual, and widened its input."""
    for weight in weights:
        wide = x.repeat(1, weight.shape[1] // x.shape[1] + 1)[:, : weight.shape[1]].contiguous()
        x = ops.linear(wide, weight, overlap, residual=x)
    return x


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("m", [24, 64, 128])
def test_overlapping_launches_give_the_serial_bits(ops: LinearOps, m: int) -> None:
    weights = [rows(n, k, scale=0.3 * k**-0.5) for n, k in SHAPES * 6]
    x = rows(m, 2560)
    expected = chain(ops, x, weights, overlap=False)
    graph, out = captured(lambda: chain(ops, x, weights, overlap=True))
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_what_the_kernel_cannot_read_is_refused(ops: LinearOps) -> None:
    x, weight = rows(32, 2560), rows(2560, 2560)
    for wrong, what in (
        (x.float(), "x must be bfloat16"),
        (x[:, ::2], "x must be bfloat16"),
        (rows(32, 2564)[:, :2560], "x must be bfloat16"),
        (x[:, :2496].contiguous(), "weight must be dense bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=what):
            launched(wrong, weight, 0)
    for wrong, what in (
        (weight.T, "weight must be dense"),
        (weight[:2559], "n a multiple of 8"),
        (weight.half(), "weight must be dense"),
    ):
        with pytest.raises(RuntimeError, match=what):
            launched(x, wrong, 0)
    with pytest.raises(RuntimeError, match="residual must be dense"):
        launched(x, weight, 0, rows(31, 2560))
    with pytest.raises(RuntimeError, match="unknown cut"):
        launched(x, weight, len(CUTS))
    with pytest.raises(RuntimeError, match="fewer columns"):
        launched(rows(32, 64), rows(2560, 64), 0)
    with pytest.raises(ValueError, match="use torch's linear"):
        HopperNarrowOps().linear(rows(4096, 2560), weight, False)
