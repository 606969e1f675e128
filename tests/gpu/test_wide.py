# SPDX-License-Identifier: Apache-2.0
"""The CUDA C++ matmul of many tokens against fp64 and cuBLAS, in graphs, and beside other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm.kernels.linear_ops import LinearOps
from vllm.kernels.wide import HopperWideOps, find_wide_ops
from vllm.kernels.wide_shapes import SPANS, TILES

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
EVERY_TILE = range(len(TILES))


@pytest.fixture(scope="module", autouse=True)
def ops() -> LinearOps:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel holds machine code of compute capability 9.0")
    found = find_wide_ops((9, 0))
    assert isinstance(found, HopperWideOps), "build the CUDA ops first"
    return found


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def tokens_of(m: int, k: int) -> Tensor:
    """Rows of a wider tensor amid NaN."""
    wide = torch.full((m + 2, k + 8), float("nan"), dtype=BF16, device="cuda")
    wide[1:-1, :k] = torch.randn(m, k, device="cuda")
    return wide[1:-1, :k]


def weight_of(n: int, k: int) -> Tensor:
    """Rows amid NaN rows."""
    rows = torch.full((n + 2, k), float("nan"), dtype=BF16, device="cuda")
    rows[1:-1] = torch.randn(n, k, device="cuda") * k**-0.5
    return rows[1:-1]


def residual_of(m: int, n: int) -> Tensor:
    return torch.randn(m, n, device="cuda").to(BF16)


def cublas(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def launched(
    x: Tensor,
    weight: Tensor,
    tile: int,
    residual: Tensor | None = None,
    *,
    overlap: bool = False,
    group: int = 2,
) -> Tensor:
    op = torch.ops.vllm_cuda.wide_linear.default
    out: Tensor = op(x, weight, residual, overlap, tile, group)
    return out


def error_ratios(x: Tensor, weight: Tensor, *outs: Tensor) -> list[float]:
    """`||out - ref|| / ||ref||` with ref in fp64."""
    ref = x.double() @ weight.double().T
    return [float((out.double() - ref).norm() / ref.norm()) for out in outs]


def into_nan(op: Callable[[], Tensor], rows: int, columns: int) -> Tensor:
    """The op's result, written to memory that held NaN: what it leaves out shows."""
    poison = torch.full((rows, columns), float("nan"), dtype=BF16, device="cuda")
    address = poison.data_ptr()
    del poison
    out = op()
    assert out.data_ptr() == address and out.shape == (rows, columns)
    return out


@pytest.mark.parametrize(("n", "k"), SPANS)
def test_no_less_exact_than_cublas_where_it_is_taken(ops: LinearOps, n: int, k: int) -> None:
    weight = weight_of(n, k)
    ends = {m for span in SPANS[n, k] for m in (span.least, min(span.most, span.least + 4097))}
    for m in ends:
        x = tokens_of(m, k)
        assert ops.takes(x, weight, None)
        out = into_nan(lambda: ops.linear(x, weight, False), m, n)  # noqa: B023
        rows = slice(max(0, m - 300), m)
        ours, theirs = error_ratios(x[rows], weight, out[rows], cublas(x[rows], weight))
        assert ours < 1.01 * theirs


@pytest.mark.parametrize("tile", EVERY_TILE)
@pytest.mark.parametrize("k", [8, 64, 136, 640])
def test_ragged_shapes_and_residuals(tile: int, k: int) -> None:
    for n in (8, 200, 1096):
        weight = weight_of(n, k)
        for m in (1, 130, 400, 1025):
            x, residual = tokens_of(m, k), residual_of(m, n)
            for group in (1, 3):
                out = into_nan(lambda: launched(x, weight, tile, group=group), m, n)  # noqa: B023
                ours, theirs = error_ratios(x, weight, out, cublas(x, weight))
                assert ours < 1.02 * theirs + 1e-5
                added = into_nan(  # noqa: B023
                    lambda: launched(x, weight, tile, residual, group=group),  # noqa: B023
                    m,
                    n,
                )
                assert torch.equal(added, out + residual)


def test_all_tiles_have_the_same_bits() -> None:
    """Of several tiles a multiprocessor, with a residual that each has to fetch in time."""
    n, k = 12352, 2560
    x, weight, residual = tokens_of(1500, k), weight_of(n, k), residual_of(1500, n)
    expected = launched(x, weight, 0)
    for tile in EVERY_TILE:
        for group in (1, 2, 8):
            assert torch.equal(launched(x, weight, tile, group=group), expected)
        assert torch.equal(launched(x, weight, tile, residual), expected + residual)


@pytest.mark.parametrize("tile", EVERY_TILE)
def test_a_row_does_not_depend_on_the_rows_beside_it(tile: int) -> None:
    x, weight = tokens_of(1500, 1024), weight_of(1352, 1024)
    whole = launched(x, weight, tile)
    for rows in (slice(0, 1), slice(3, 60), slice(700, 1000), slice(100, 500), slice(0, 1499)):
        assert torch.equal(launched(x[rows], weight, tile), whole[rows])
    others = x.clone()
    others[:700] = float("inf")
    others[900] = float("nan")
    out = launched(others, weight, tile)
    assert torch.equal(out[700:900], whole[700:900]) and torch.equal(out[901:], whole[901:])
    assert not out[:700].isfinite().any() and out[900].isnan().all()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("m", [32, 200, 1100])
def test_chains_in_graphs_give_the_serial_bits(m: int, overlap: bool) -> None:
    """Each result is the next one's input and residual; buffers of two steps ago are reused."""
    n = k = 1024
    weights = [weight_of(n, k) for _ in EVERY_TILE]

    def run(x: Tensor, overlap: bool) -> Tensor:
        y = x
        for _ in range(3):
            for tile in EVERY_TILE:
                branch = launched(y, weights[tile], tile, overlap=overlap)
                y = launched(branch, weights[tile - 1], tile, y, overlap=overlap)
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


def test_what_cannot_be_launched_is_refused(ops: LinearOps) -> None:
    x, weight, residual = tokens_of(40, 64), weight_of(64, 64), residual_of(40, 64)
    assert launched(x[:0], weight, 0).shape == (0, 64)
    refused = (
        (x, weight, 99, None, "unknown variant"),
        (x.half(), weight, 0, None, "x must be bfloat16"),
        (x, weight.half(), 0, None, "weight must be bfloat16"),
        (x, weight[:20], 0, None, "multiple of 8"),
        (x[:, :56], weight, 0, None, "x's k"),
        (x[:, 4:], weight[:, 4:], 0, None, "16-byte aligned"),
        (x, weight, 0, residual[:39], "dense"),
        (x, weight, 0, residual.T, "residual must be"),
        (x, weight, 0, residual.half(), "residual must be bfloat16"),
    )
    for x_, weight_, tile, residual_, why in refused:
        with pytest.raises(RuntimeError, match=why):
            launched(x_, weight_, tile, residual_)
    with pytest.raises(RuntimeError, match="at least one row"):
        launched(x, weight, 0, group=0)
    with pytest.raises(ValueError, match="use torch's linear"):
        ops.linear(x, weight, False)
