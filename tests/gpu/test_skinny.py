# SPDX-License-Identifier: Apache-2.0
"""The CUDA C++ matmul of few tokens against fp64, in graphs, and beside other requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCE, error_ratio
from vllm._extension import CUDA_LIBRARY
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.linear.skinny import OPS, skinny_linear, skinny_silu_and_mul
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.residual_stream import Norm

pytestmark = pytest.mark.gpu

# [n, k] of Qwen3.5-4B, then ragged and small ones
SHAPES = [(18432, 2560), (12352, 2560), (10240, 2560), (2560, 9216), (2560, 4096), (20000, 2560)]
SHAPES += [(100, 4160), (2, 32), (8, 64), (1058, 544), (34, 96)]
VARIANTS = (0, 1)
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def _ops() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    found = OPS.choose(torch.cuda.get_device_capability())
    assert found, "build the CUDA ops first"


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def tokens_of(m: int, k: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of a wider tensor whose other columns are NaN."""
    wide = torch.full((m, k + 8), float("nan"), dtype=dtype, device="cuda")
    wide[:, :k] = torch.randn(m, k, device="cuda")
    return wide[:, :k]


def weight_of(n: int, k: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows amid NaN rows."""
    rows = torch.full((n + 4, k), float("nan"), dtype=dtype, device="cuda")
    rows[2:-2] = torch.randn(n, k, device="cuda") * k**-0.5
    return rows[2:-2]


def into_nan(op: Callable[[], Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The op's result, written to memory that held NaN: what it leaves out shows."""
    poison = torch.full((rows, columns), float("nan"), dtype=dtype, device="cuda")
    address = poison.data_ptr()
    del poison
    out = op()
    assert out.data_ptr() == address and out.shape == (rows, columns)
    return out


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_fp64(n: int, k: int, dtype: torch.dtype) -> None:
    weight, reference = weight_of(n, k, dtype), NaiveKernels()
    for m in (1, 2, 7, 8, 9, 15, 16):
        x = tokens_of(m, k, dtype)
        for bias in (None, torch.randn(n, device="cuda").to(dtype)):
            wide = [t if t is None else t.double() for t in (x, weight, bias)]
            out = into_nan(lambda: skinny_linear(x, weight, bias, False), m, n, dtype)  # noqa: B023
            assert error_ratio(out, reference.linear(*wide)) < TOLERANCE[dtype]
            gated = into_nan(
                lambda: skinny_silu_and_mul(x, weight, bias, False),  # noqa: B023
                m,
                n // 2,
                dtype,
            )
            assert torch.equal(gated, CudaKernels().silu_and_mul(out))


def launched(
    x: Tensor,
    weight: Tensor,
    launch: tuple[int, int, int],
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`launch`: variant, bytes of the ring, CTAs per multiprocessor."""
    out: Tensor = torch.ops.vllm_cuda.skinny_linear.default(
        x, norm, 1e-6, True, weight, bias, residual, False, *launch
    )
    return out


@pytest.mark.parametrize("ctas_per_sm", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_compiled_variant(variant: int, ctas_per_sm: int) -> None:
    for (n, k), m in itertools.product([(2560, 4096), (12352, 2560), (1058, 544)], (3, 16)):
        x, weight = tokens_of(m, k), weight_of(n, k)
        out = launched(x, weight, (variant, 102 * 1024, ctas_per_sm))
        assert error_ratio(out, x.double() @ weight.double().T) < TOLERANCE[BF16]
        assert torch.equal(out, skinny_linear(x, weight, None, False))


def test_launches_that_cannot_be_are_refused() -> None:
    x, weight = tokens_of(2, 64), weight_of(8, 64)
    gated = torch.ops.vllm_cuda.skinny_linear_silu_and_mul.default
    with pytest.raises(RuntimeError, match="odd number of tiles"):
        gated(x, None, 0.0, False, weight, None, False, 1, 102 * 1024, 1)
    for launch, why in (
        ((99, 102400, 1), "unknown variant"),
        ((0, 4096, 1), "fewer than two stages"),
        ((0, 230_000, 1), "larger than shared memory"),
        ((0, 102400, 0), "impossible"),
    ):
        with pytest.raises(RuntimeError, match=why):
            launched(x, weight, launch)
    for variant, m, k, why in (
        (1, 2, 2560, "needs variant 0"),
        (0, 2, 512, "than it is made for"),
        (0, 2, 3104, "than it is made for"),
        (0, 9, 2560, "than it is made for"),
    ):
        with pytest.raises(RuntimeError, match=why):
            launched(
                tokens_of(m, k), weight_of(8, k), (variant, 102400, 1), norm=weight_of(1, k)[0]
            )


@pytest.mark.parametrize(("n", "k"), [(2560, 9216), (1058, 544)])
def test_a_row_does_not_depend_on_the_rows_beside_it(n: int, k: int) -> None:
    x, weight = tokens_of(16, k), weight_of(n, k)
    whole = skinny_linear(x, weight, None, False)
    gated = skinny_silu_and_mul(x, weight, None, False)
    for m in range(1, 16):
        start = 16 - m
        assert torch.equal(skinny_linear(x[start:], weight, None, False), whole[start:])
        assert torch.equal(skinny_silu_and_mul(x[:m], weight, None, False), gated[:m])
    assert torch.equal(skinny_linear(x, weight[: n // 2], None, False), whole[:, : n // 2])


def chain(x: Tensor, weights: list[Tensor], overlap: bool) -> Tensor:
    """Each result is the next one's input; the buffers of two steps ago are reused."""
    for up, down in weights:
        x = skinny_linear(skinny_silu_and_mul(x, up, None, overlap), down, None, overlap)
    return x


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("m", [1, 16])
def test_overlapping_launches_give_the_serial_bits(m: int) -> None:
    weights = [(weight_of(2 * 9216, 2560), weight_of(2560, 9216)) for _ in range(8)]
    x = torch.randn(m, 2560, dtype=BF16, device="cuda")
    expected = chain(x, weights, overlap=False)
    graph, out = captured(lambda: chain(x, weights, overlap=True))
    for _ in range(30):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_overlap_beside_other_work_of_a_graph() -> None:
    """Predecessors that are no kernels or take no part, and a stream that forks and joins."""
    weight, x = weight_of(2560, 2560), torch.randn(4, 2560, dtype=BF16, device="cuda")

    def run(overlap: bool) -> Tensor:
        stream, side, y = torch.cuda.current_stream(), torch.cuda.Stream(), x
        for _ in range(4):
            copied, total = torch.empty_like(y), torch.zeros_like(y)
            copied.copy_(y)
            y = skinny_linear(copied, weight, None, overlap)
            total += y
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                left = skinny_linear(total, weight, None, overlap)
            right = skinny_linear(total * 0.5, weight, None, overlap)
            stream.wait_stream(side)
            y = skinny_linear(left, weight, None, overlap) + right
        return y

    expected = run(overlap=False)
    torch.cuda.synchronize()
    graph, out = captured(lambda: run(overlap=True))
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_what_the_kernel_cannot_read_is_refused() -> None:
    x, weight = tokens_of(2, 64), weight_of(8, 64)
    with pytest.raises(RuntimeError, match="x must be at most 16 rows"):
        skinny_linear(tokens_of(17, 64), weight, None, False)
    with pytest.raises(RuntimeError, match="weight must be dense .* got .*8, 48"):
        skinny_linear(tokens_of(2, 48), weight_of(8, 48), None, False)
    with pytest.raises(RuntimeError, match="weight must have as many columns as x"):
        skinny_linear(x, weight_of(8, 96), None, False)
    with pytest.raises(RuntimeError, match="residual must be dense"):
        skinny_linear(x, weight, None, False, residual=tokens_of(2, 9))
    with pytest.raises(RuntimeError, match="norm must be dense"):
        skinny_linear(x, weight, None, False, norm=Norm(weight[0].float(), 1e-6, True))
    with pytest.raises(RuntimeError, match="x must be bfloat16 or float16"):
        skinny_linear(x.float(), weight.float(), None, False)
    with pytest.raises(RuntimeError, match="bias must be dense"):
        skinny_linear(x, weight, weight[0], False)
    with pytest.raises(RuntimeError, match="even number of rows"):
        skinny_silu_and_mul(x, weight[:7], None, False)
