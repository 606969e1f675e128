# SPDX-License-Identifier: Apache-2.0
"""When 9 to 64 tokens are multiplied by `vllm_cuda`, and how the product is cut up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm.kernels import cuda_library
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER, CudaOps
from vllm.kernels.linear import narrow, skinny
from vllm.kernels.linear.narrow import (
    LEAST_ELEMENTS,
    MOST_ROWS,
    NarrowCut,
    is_narrow,
    narrow_cut,
)
from vllm.kernels.naive import NaiveKernels
from vllm.utils.math_utils import cdiv

BF16 = torch.bfloat16
N, K = 2048, LEAST_ELEMENTS // 2048
#: clusters of so many CTAs that an H200 runs at once
H200 = {1: 132, 2: 66, 4: 30, 8: 15}


class Recorder:
    """The kernels in plain torch; notes how they were called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: bool,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        self.calls.append(("linear", overlap))
        out = torch.nn.functional.linear(x, weight, bias)
        return out if residual is None else out + residual

    def silu_and_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: bool) -> Tensor:
        self.calls.append(("linear_silu_and_mul", overlap))
        return NaiveKernels().linear_silu_and_mul(x, weight, bias)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What `CudaKernels(HOPPER)` multiplies 9 to 64 tokens by."""
    recorder = Recorder()
    monkeypatch.setattr(narrow, "narrow_linear", recorder.linear)
    monkeypatch.setattr(narrow, "narrow_silu_and_mul", recorder.silu_and_mul)
    monkeypatch.setattr(CudaOps, "choose", lambda ops, capability: ops is narrow.OPS)
    return recorder


@pytest.fixture(autouse=True)
def _not_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of torch without CUDA cannot even be asked."""
    monkeypatch.setattr(cuda_library.torch.cuda, "is_current_stream_capturing", lambda: False)


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize("tokens", [9, 16, 64])
def test_some_tokens_are_narrow(tokens: int) -> None:
    weight = ones(N, K)
    assert is_narrow(ones(tokens, K), weight, None) and is_narrow(ones(tokens, K), weight, ones(N))
    assert is_narrow(ones(tokens, K + 8)[:, 8:], weight, None, gated=True)


def test_small_weights_of_few_rows_are_narrow() -> None:
    for n, k in ((264, 2048), (1024, 2048), (128, 2048)):
        assert is_narrow(ones(32, k), ones(n, k), None)
    assert not is_narrow(ones(32, 2048), ones(1032, 2048), None)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        pytest.param(ones(8, K), ones(N, K), None, id="few tokens"),
        pytest.param(ones(65, K), ones(N, K), None, id="many tokens"),
        pytest.param(ones(32, 1, K), ones(N, K), None, id="three dimensions"),
        pytest.param(ones(32, K - 8), ones(N, K - 8), None, id="small weight"),
        pytest.param(ones(32, 2032), ones(128, 2032), None, id="very small weight"),
        pytest.param(
            ones(32, K, dtype=torch.half), ones(N, K, dtype=torch.half), None, id="another dtype"
        ),
        pytest.param(ones(32, K), ones(N + 4, K), None, id="rows"),
        pytest.param(ones(32, K + 4), ones(N, K + 4), None, id="columns"),
        pytest.param(ones(32, K), ones(K, N).T, None, id="transposed weight"),
        pytest.param(ones(32, K), ones(N * K + 4)[4:].view(N, K), None, id="weight at 8 bytes"),
        pytest.param(ones(K, 32).T, ones(N, K), None, id="transposed tokens"),
        pytest.param(ones(32, K + 4)[:, :K], ones(N, K), None, id="token stride"),
        pytest.param(ones(1, K).expand(32, K), ones(N, K), None, id="one token many times"),
        pytest.param(ones(32, K + 8)[:, 4 : K + 4], ones(N, K), None, id="token offset"),
        pytest.param(ones(32, K), ones(N, K), ones(N + 4)[4:], id="bias at 8 bytes"),
    ],
)
def test_what_is_not_narrow_goes_to_torch(
    recorder: Recorder, x: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    assert not is_narrow(x, weight, bias)
    out = CudaKernels(HOPPER).linear(x, weight, bias)
    assert torch.equal(out, torch.nn.functional.linear(x, weight, bias)) and not recorder.calls


@pytest.mark.parametrize("capturing", [False, True])
def test_launches_overlap_in_graphs_only(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    monkeypatch.setattr(cuda_library.torch.cuda, "is_current_stream_capturing", lambda: capturing)
    torch.manual_seed(0)
    kernels, naive = CudaKernels(HOPPER), NaiveKernels()
    x, weight, bias, residual = (torch.randn(*s).to(BF16) for s in ((17, K), (N, K), (N,), (17, N)))
    product = naive.linear(x, weight, bias)
    assert torch.equal(kernels.linear(x, weight, bias), product)
    gated = kernels.linear_silu_and_mul(x, weight, bias)
    assert torch.equal(gated, naive.linear_silu_and_mul(x, weight, bias))
    stream = kernels.linear_add(x, weight, bias, residual)
    assert stream.branch is None and torch.equal(stream.residual, residual + product)
    names = ["linear", "linear_silu_and_mul", "linear"]
    assert recorder.calls == [(name, capturing) for name in names]


@pytest.mark.parametrize(
    ("tokens", "n", "dtype", "who"),
    [
        (8, N, BF16, "skinny"),
        (9, N, BF16, "narrow"),
        (16, N, BF16, "narrow"),
        (16, N + 4, BF16, "skinny"),
        (16, N // 2, BF16, "skinny"),
        (17, N // 2, BF16, "narrow"),
        (16, N, torch.half, "skinny"),
        (17, N + 4, BF16, "torch"),
    ],
)
def test_what_is_not_narrow_may_be_skinny(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    n: int,
    dtype: torch.dtype,
    who: str,
) -> None:
    few = Recorder()
    monkeypatch.setattr(skinny, "skinny_linear", few.linear)
    monkeypatch.setattr(CudaOps, "choose", lambda ops, _: ops in (narrow.OPS, skinny.OPS))
    x, weight, residual = (ones(*s, dtype=dtype) for s in ((tokens, K), (n, K), (tokens, n)))
    kernels = CudaKernels(HOPPER)
    kernels.linear(x, weight, None)
    kernels.linear_add(x, weight, None, residual)
    assert len(recorder.calls) == 2 * (who == "narrow")
    assert len(few.calls) == 2 * (who == "skinny")


def test_a_residual_that_cannot_be_read_is_left_to_the_norm(recorder: Recorder) -> None:
    x, weight, residual = ones(32, K), ones(N, K), ones(N, 32).T
    stream = CudaKernels(HOPPER).linear_add(x, weight, None, residual)
    assert stream.residual is residual and stream.branch is not None
    assert recorder.calls == [("linear", False)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [1024, 2048, 2560, 4096, 10240, 12352, 18432, 24576, 248320])
def test_the_cut_follows_from_the_weight(n: int, gated: bool) -> None:
    cut = narrow_cut(n, gated, H200)
    assert cut.rows % (16 if gated else 8) == 0 and 0 < cut.rows <= MOST_ROWS
    tiles = cdiv(n, cut.rows)
    # Several CTAs share out a tile only where all clusters run at once.
    assert cut.split == 1 or tiles <= H200[cut.split]
    # As few rows for the busiest CTA as there can be, but for the last group.
    rounds = cdiv(tiles, H200[cut.split])
    assert rounds * cut.rows < n / H200[cut.split] + 16 * rounds


def test_fields_of_a_cut() -> None:
    cut = NarrowCut(rows=96, split=4, token_bytes=1024, shared_bytes=2048)
    assert cut.fields == (96, 4, 1024, 2048)
