# SPDX-License-Identifier: Apache-2.0
"""The gated matmul in CUDA C++ against fp64 and the two ops, in graphs, and beside other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm._extension import CUDA_LIBRARY
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.linear.swiglu import OPS, SHAPES, swiglu

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
QWEN = (9216, 2560)  # [n, k] of Qwen3.5-4B
#: tokens around the edges of tiles and clusters
TOKENS = (1, 17, 64, 65, 127, 128, 129, 255, 256, 257, 300, 512, 513, 1000, 1024, 2048, 4095, 8192)


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel holds machine code of compute capability 9.0")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    assert OPS.choose((9, 0))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def tokens_of(m: int, k: int) -> Tensor:
    """Rows of a wider tensor amid NaN."""
    wide = torch.full((m + 2, k + 8), float("nan"), dtype=BF16, device="cuda")
    wide[1:-1, :k] = torch.randn(m, k, device="cuda")
    return wide[1:-1, :k]


def weight_of(n: int, k: int) -> Tensor:
    """Rows amid NaN rows, with products of about 3."""
    rows = torch.full((2 * n + 2, k), float("nan"), dtype=BF16, device="cuda")
    rows[1:-1] = torch.randn(2 * n, k, device="cuda") * 3 * k**-0.5
    return rows[1:-1]


def two_ops(x: Tensor, weight: Tensor) -> Tensor:
    return CudaKernels().linear_silu_and_mul(x, weight, None)


def error_ratios(x: Tensor, weight: Tensor, *outs: Tensor) -> list[float]:
    """`||out - ref|| / ||ref||` with ref in fp64."""
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    ref = torch.nn.functional.silu(gate) * up
    return [float((out.double() - ref).norm() / ref.norm()) for out in outs]


def into_nan(op: Callable[[], Tensor], rows: int, columns: int) -> Tensor:
    """The op's result, written to memory that held NaN: what it leaves out shows."""
    poison = torch.full((rows, columns), float("nan"), dtype=BF16, device="cuda")
    address = poison.data_ptr()
    del poison
    out = op()
    assert out.data_ptr() == address and out.shape == (rows, columns)
    return out


@pytest.mark.parametrize("m", TOKENS)
def test_no_less_exact_than_two_ops(m: int) -> None:
    n, k = QWEN
    x, weight = tokens_of(m, k), weight_of(n, k)
    out = into_nan(lambda: swiglu(x, weight, False), m, n)
    rows = slice(max(0, m - 700), m)
    ours, separate = error_ratios(x[rows], weight, out[rows], two_ops(x, weight)[rows])
    assert ours < 1.01 * separate


def launched(x: Tensor, weight: Tensor, variant: int, group: int) -> Tensor:
    out: Tensor = torch.ops.vllm_cuda.swiglu.default(x, weight, False, variant, group)
    return out


@pytest.mark.parametrize("k", [8, 64, 72, 136, 640])
@pytest.mark.parametrize("n", [8, 72, 200, 1096])
def test_ragged_shapes_and_every_variant(n: int, k: int) -> None:
    for m in (1, 130, 1025):
        x, weight = tokens_of(m, k), weight_of(n, k)
        for variant in range(len(SHAPES)):
            for group in (1, 3):
                out = into_nan(lambda: launched(x, weight, variant, group), m, n)  # noqa: B023
                ours, separate = error_ratios(x, weight, out, two_ops(x, weight))
                assert ours < 1.02 * separate + 1e-5


def test_all_variants_have_the_same_bits() -> None:
    n, k = QWEN
    x, weight = tokens_of(700, k), weight_of(n, k)
    expected = launched(x, weight, 0, 2)
    for variant in range(len(SHAPES)):
        for group in (1, 2, 8):
            assert torch.equal(launched(x, weight, variant, group), expected)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    n, k = QWEN
    x, weight = tokens_of(1500, k), weight_of(n, k)
    whole = swiglu(x, weight, False)
    for rows in (slice(3, 20), slice(1, 500), slice(100, 400), slice(0, 1499)):
        assert torch.equal(swiglu(x[rows], weight, False), whole[rows])
    others = x.clone()
    others[:700] = float("inf")
    assert torch.equal(swiglu(others, weight, False)[700:], whole[700:])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("m", [32, 200, 1100])
def test_chains_in_graphs_give_the_serial_bits(m: int, overlap: bool) -> None:
    """Each result is the next one's input; the buffers of two steps ago are reused."""
    n, k = 2048, 1024
    layers = [(weight_of(n, k), weight_of(k // 2, n)) for _ in range(2)]

    def run(x: Tensor, overlap: bool) -> Tensor:
        for _ in range(5):
            y = x
            for up, down in layers:
                y = swiglu(swiglu(y, up, overlap), down, overlap)
                y = torch.cat([y, y], dim=1)
        return y

    x = torch.randn(m, k, dtype=BF16, device="cuda")
    expected = run(x, False)
    assert expected.isfinite().all() and float(expected.abs().max()) > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, overlap)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_products_are_rounded_as_by_the_two_ops() -> None:
    """Sums that fp32 holds exactly, whatever their order."""
    x = torch.randint(-8, 9, (300, 256), device="cuda").to(BF16)
    weight = torch.randint(-8, 9, (400, 256), device="cuda").to(BF16) / 128
    exact = x.float() @ weight.float().T
    assert not torch.equal(exact.to(BF16).float(), exact)
    assert torch.equal(swiglu(x, weight, False), two_ops(x, weight))


def test_every_gate_is_activated_as_by_the_two_ops() -> None:
    """All finite bfloat16, each times itself."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16)
    finite = values[values.isfinite()].cuda()
    x = finite[: len(finite) // 64 * 64].view(-1, 64)
    identity = torch.eye(64, dtype=BF16, device="cuda")
    weight = torch.cat([identity, identity])
    assert len(finite) == 2 * 0x7F80 and x.numel() == len(finite)
    assert torch.equal(swiglu(x, weight, False), two_ops(x, weight))


def test_nan_and_infinity_stay_in_their_rows() -> None:
    x, weight = tokens_of(300, 512), weight_of(256, 512)
    whole = swiglu(x, weight, False)
    for value in (float("nan"), float("inf")):
        other = x.clone()
        other[37, 5] = value
        out = swiglu(other, weight, False)
        assert not out[37].isfinite().all()
        assert torch.equal(torch.cat([out[:37], out[38:]]), torch.cat([whole[:37], whole[38:]]))


def test_what_cannot_be_launched_is_refused() -> None:
    x, weight = tokens_of(40, 64), weight_of(64, 64)
    assert launched(x[:0], weight, 0, 1).shape == (0, 64)
    for args, why in (
        ((x, weight, 99, 1), "unknown variant"),
        ((x, weight, 0, 0), "at least one row"),
        ((x.half(), weight, 0, 1), "x must be bfloat16"),
        ((x, weight.half(), 0, 1), "weight must be bfloat16"),
        ((x, weight[:24], 0, 1), "multiple of 8"),
        ((x[:, :56], weight, 0, 1), "x's k"),
        ((x[:, 4:], weight[:, 4:], 0, 1), "16-byte aligned"),
    ):
        with pytest.raises(RuntimeError, match=why):
            launched(*args)
