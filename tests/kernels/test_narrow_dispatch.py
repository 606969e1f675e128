# SPDX-License-Identifier: Apache-2.0
"""When 17 to 256 tokens are multiplied by `vllm_cuda`, and when by cuBLAS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm import decisions
from vllm.kernels import cuda, narrow
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.linear_ops import can_read
from vllm.kernels.narrow import HopperNarrowOps
from vllm.kernels.narrow_cuts import CUTS, narrow_cut
from vllm.kernels.residual_stream import ResidualStream

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("m", "n", "k", "cut"),
    [
        pytest.param(16, 2560, 9216, None, id="skinny"),
        pytest.param(17, 2560, 9216, 0, id="fewest tokens"),
        pytest.param(64, 2560, 4096, 0, id="most of a tile"),
        pytest.param(65, 2560, 9216, 1, id="two tiles"),
        pytest.param(128, 2560, 4096, 1, id="most of two tiles"),
        pytest.param(129, 2560, 9216, None, id="cuBLAS is faster there"),
        pytest.param(191, 2560, 9216, None, id="and still is"),
        pytest.param(192, 2560, 9216, 2, id="two large tiles"),
        pytest.param(256, 2560, 4096, None, id="few columns of many tokens"),
        pytest.param(256, 2560, 9216, 2, id="most tokens"),
        pytest.param(257, 2560, 9216, None, id="many tokens"),
        pytest.param(64, 2640, 9216, 0, id="most rows"),
        pytest.param(64, 2648, 9216, None, id="a second wave of clusters"),
        pytest.param(64, 2552, 9216, None, id="idle multiprocessors"),
        pytest.param(128, 2464, 9216, None, id="idle multiprocessors of large clusters"),
        pytest.param(64, 2564, 9216, None, id="odd rows"),
        pytest.param(64, 2560, 9248, None, id="odd columns"),
        pytest.param(64, 2560, 2560, None, id="few columns"),
        pytest.param(64, 18432, 2560, None, id="many rows"),
    ],
)
def test_sizes(m: int, n: int, k: int, cut: int | None) -> None:
    assert narrow_cut(m, n, k) == cut


def blank(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("x", "weight", "bias", "reads"),
    [
        pytest.param(blank(17, 64), blank(8, 64), None, True, id="dense"),
        pytest.param(blank(17, 72)[:, 8:], blank(8, 64), None, True, id="part of a row"),
        pytest.param(blank(17, 64), blank(8, 64), blank(8), False, id="bias"),
        pytest.param(blank(17, 1, 64), blank(8, 64), None, False, id="three dimensions"),
        pytest.param(blank(17, 64).half(), blank(8, 64).half(), None, False, id="fp16"),
        pytest.param(blank(17, 128)[:, ::2], blank(8, 64), None, False, id="every other column"),
        pytest.param(blank(17, 68)[:, :64], blank(8, 64), None, False, id="token stride"),
        pytest.param(blank(17, 72)[:, 4:68], blank(8, 64), None, False, id="token offset"),
        pytest.param(blank(17, 64), blank(64, 8).T, None, False, id="transposed weight"),
        pytest.param(blank(17, 64), blank(516)[4:].view(8, 64), None, False, id="weight offset"),
    ],
)
def test_layouts(x: Tensor, weight: Tensor, bias: Tensor | None, reads: bool) -> None:
    assert can_read(x, weight, bias) == reads


def ops_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, clusters: Callable[[int], int]
) -> HopperNarrowOps:
    """Where so many clusters of a cut fit."""

    class Library:
        @staticmethod
        def narrow_linear_clusters(cut: int, device: int) -> int:
            assert device == 0
            return clusters(cut)

    monkeypatch.setattr(narrow.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(narrow.torch.ops, "vllm_cuda", Library, raising=False)
    return HopperNarrowOps()


def test_a_gpu_with_all_clusters_at_once_takes_every_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ops_of_a_gpu(monkeypatch, lambda cut: CUTS[cut].clusters)
    weight = blank(2560, 9216)
    assert all(ops.takes(blank(cut.most_tokens, 9216), weight, None) for cut in CUTS)
    assert not ops.takes(blank(17, 9216), weight, blank(2560))
    assert not ops.takes(blank(16, 9216), weight, None)


def test_a_cut_of_more_clusters_than_fit_is_left_to_cublas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = ops_of_a_gpu(monkeypatch, lambda cut: CUTS[cut].clusters - (cut > 0))
    weight = blank(2560, 9216)
    assert [ops.takes(blank(m, 9216), weight, None) for m in (64, 65, 256)] == [True, False, False]
    (decision,) = [d for d in decisions.decisions() if d.what == f"cuts of {narrow.WHAT}"]
    assert decision.chosen == "those of [64] tokens"


def test_sizes_without_a_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="use torch's linear"):
        HopperNarrowOps().linear(blank(512, 2560), blank(2560, 2560), False)


class Recorder:
    """Ops that take 17 to 20 tokens, note how they were called and compute in plain torch."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, bool]] = []

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return bias is None and 17 <= len(x) <= 20

    def linear(
        self, x: Tensor, weight: Tensor, overlap: bool, *, residual: Tensor | None = None
    ) -> Tensor:
        self.calls.append((overlap, residual is not None))
        out = torch.nn.functional.linear(x, weight)
        return out if residual is None else residual + out


@pytest.mark.parametrize("capturing", [False, True])
def test_the_residual_goes_along_and_launches_overlap_in_graphs_only(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    monkeypatch.setattr(cuda.torch.cuda, "is_current_stream_capturing", lambda: capturing)
    recorder = Recorder()
    kernels = CudaKernels(narrow=recorder)
    torch.manual_seed(0)
    x, weight, residual = (torch.randn(*s).to(BF16) for s in ((17, 64), (8, 64), (17, 8)))
    plain = torch.nn.functional.linear(x, weight)
    assert torch.equal(kernels.linear(x, weight, None), plain)
    stream = kernels.linear_add(x, weight, None, residual)
    assert stream.branch is None and torch.equal(stream.residual, residual + plain)
    assert recorder.calls == [(capturing, False), (capturing, True)]


def test_what_the_ops_do_not_take_goes_to_torch() -> None:
    recorder = Recorder()
    kernels = CudaKernels(narrow=recorder)
    weight, bias = torch.ones(8, 64, dtype=BF16), torch.ones(8, dtype=BF16)
    for tokens, addend in ((21, None), (17, bias)):
        x, residual = torch.ones(tokens, 64, dtype=BF16), torch.ones(tokens, 8, dtype=BF16)
        plain = torch.nn.functional.linear(x, weight, addend)
        assert torch.equal(kernels.linear(x, weight, addend), plain)
        stream = kernels.linear_add(x, weight, addend, residual)
        assert isinstance(stream, ResidualStream) and stream.residual is residual
        assert stream.branch is not None and torch.equal(stream.branch, plain)
    assert not recorder.calls


@pytest.mark.parametrize("strided", [False, True])
def test_a_residual_of_other_layout_is_added_by_the_norm(
    monkeypatch: pytest.MonkeyPatch, strided: bool
) -> None:
    monkeypatch.setattr(cuda.torch.cuda, "is_current_stream_capturing", lambda: False)
    recorder = Recorder()
    kernels = CudaKernels(narrow=recorder)
    x, weight = torch.ones(17, 64, dtype=BF16), torch.ones(8, 64, dtype=BF16)
    residual = torch.ones(17, 16, dtype=BF16)[:, ::2] if strided else torch.ones(17, 8)
    stream = kernels.linear_add(x, weight, None, residual)
    assert stream.residual is residual and stream.branch is not None
    assert recorder.calls == [(False, False)]
