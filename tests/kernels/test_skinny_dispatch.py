# SPDX-License-Identifier: Apache-2.0
"""When few tokens are multiplied by `vllm_cuda`, and when by cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from vllm.kernels import cuda_library
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER, CudaOps
from vllm.kernels.interface import Kernels
from vllm.kernels.linear import skinny
from vllm.kernels.linear.skinny import (
    FEW_ROWS,
    MANY_ROWS,
    can_add,
    can_normalise,
    is_skinny,
    skinny_launch,
)
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.residual_stream import Norm, ResidualStream

BF16 = torch.bfloat16


@dataclass
class Recorder:
    """The kernels in plain torch; notes how they were called."""

    calls: list[tuple[str, bool]] = field(default_factory=list)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: bool,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        self.calls.append(("linear", overlap))
        out = torch.nn.functional.linear(normed(x, norm), weight, bias)
        return out if residual is None else out + residual

    def silu_and_mul(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: bool,
        *,
        norm: Norm | None = None,
    ) -> Tensor:
        self.calls.append(("linear_silu_and_mul", overlap))
        out = torch.nn.functional.linear(normed(x, norm), weight, bias)
        return NaiveKernels().silu_and_mul(out)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What `CudaKernels(HOPPER)` multiplies few tokens by."""
    recorder = Recorder()
    monkeypatch.setattr(skinny, "skinny_linear", recorder.linear)
    monkeypatch.setattr(skinny, "skinny_silu_and_mul", recorder.silu_and_mul)
    monkeypatch.setattr(CudaOps, "choose", lambda ops, capability: ops is skinny.OPS)
    return recorder


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    return NaiveKernels().rms_norm(x, norm.weight, norm.eps, one_plus=norm.one_plus)


@pytest.fixture(autouse=True)
def _not_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of torch without CUDA cannot even be asked."""
    monkeypatch.setattr(cuda_library.torch.cuda, "is_current_stream_capturing", lambda: False)


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 16])
def test_few_tokens_are_skinny(tokens: int, dtype: torch.dtype) -> None:
    assert is_skinny(ones(tokens, 96, dtype=dtype), ones(7, 96, dtype=dtype))
    sliced = ones(tokens, 104, dtype=dtype)[:, 8:]
    assert is_skinny(sliced, ones(7, 96, dtype=dtype))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        pytest.param(ones(17, 64), ones(8, 64), id="many tokens"),
        pytest.param(ones(0, 64), ones(8, 64), id="no tokens"),
        pytest.param(
            ones(2, 64).as_strided((2, 1, 64), (64, 1, 1)), ones(8, 64), id="three dimensions"
        ),
        pytest.param(ones(2, 128)[:, ::2], ones(8, 64), id="every other column"),
        pytest.param(ones(2, 64, dtype=torch.float32), ones(8, 64, dtype=torch.float32), id="fp32"),
        pytest.param(ones(2, 48), ones(8, 48), id="odd k"),
        pytest.param(ones(2, 64), ones(64, 8).T, id="transposed weight"),
        pytest.param(ones(2, 64), ones(8, 128)[:, :64], id="strided weight"),
        pytest.param(ones(2, 64), ones(8 * 64 + 4)[4:].view(8, 64), id="weight at 8 bytes"),
        pytest.param(ones(64, 2).T, ones(8, 64), id="transposed tokens"),
        pytest.param(ones(2, 68)[:, :64], ones(8, 64), id="token stride"),
        pytest.param(ones(2, 72)[:, 4:68], ones(8, 64), id="token offset"),
    ],
)
def test_what_is_not_skinny_goes_to_torch(recorder: Recorder, x: Tensor, weight: Tensor) -> None:
    assert not is_skinny(x, weight)
    out = CudaKernels(HOPPER).linear(x, weight, None)
    assert torch.equal(out, torch.nn.functional.linear(x, weight)) and not recorder.calls


@pytest.mark.parametrize("capturing", [False, True])
def test_launches_overlap_in_graphs_only(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    monkeypatch.setattr(cuda_library.torch.cuda, "is_current_stream_capturing", lambda: capturing)
    kernels = CudaKernels(HOPPER)
    x, weight, bias = ones(3, 64), ones(8, 64), ones(8)
    assert kernels.linear(x, weight, bias).tolist() == [[65.0] * 8] * 3
    assert kernels.linear_silu_and_mul(x, weight, bias).tolist() == [[4224.0] * 4] * 3
    assert recorder.calls == [("linear", capturing), ("linear_silu_and_mul", capturing)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
@pytest.mark.parametrize("make", [NaiveKernels, CpuKernels])
def test_the_fused_op_is_the_two_separate_ones(make: type[Kernels], dtype: torch.dtype) -> None:
    if make is CpuKernels and dtype is torch.float64:
        pytest.skip("the C++ ops have no fp64")
    torch.manual_seed(0)
    kernels = make()
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((5, 64), (2 * 24, 64), (2 * 24,)))
    expected = kernels.silu_and_mul(kernels.linear(x, weight, bias))
    out = kernels.linear_silu_and_mul(x, weight, bias)
    assert out.shape == (5, 24) and torch.equal(out, expected)


def norm_of(columns: int, dtype: torch.dtype = BF16) -> Norm:
    return Norm(torch.linspace(-1, 1, columns).to(dtype), 1e-6, True)


@pytest.mark.parametrize(
    ("x", "norm", "takes"),
    [
        pytest.param(ones(8, 2560), norm_of(2560), True, id="one of the models"),
        pytest.param(ones(9, 2560), norm_of(2560), False, id="many tokens"),
        pytest.param(ones(1, 544), norm_of(544), True, id="least columns"),
        pytest.param(ones(1, 3072), norm_of(3072), True, id="most columns"),
        pytest.param(ones(1, 512), norm_of(512), False, id="few columns"),
        pytest.param(ones(1, 3104), norm_of(3104), False, id="many columns"),
        pytest.param(ones(1, 544), norm_of(544, torch.float32), False, id="fp32 weight"),
        pytest.param(
            ones(1, 544), Norm(ones(552)[4:548], 1e-6, True), False, id="weight at 8 bytes"
        ),
        pytest.param(
            ones(1, 544), Norm(ones(1088)[::2], 1e-6, True), False, id="every other weight"
        ),
    ],
)
def test_norms_that_the_ops_take_along(x: Tensor, norm: Norm, takes: bool) -> None:
    assert can_normalise(norm, x) == takes


def test_a_stream_that_is_added_up_is_one_launch(recorder: Recorder) -> None:
    torch.manual_seed(0)
    kernels, naive = CudaKernels(HOPPER), NaiveKernels()
    x, weight, norm = torch.randn(3, 544).to(BF16), torch.randn(8, 544).to(BF16), norm_of(544)
    out, total = kernels.norm_linear(ResidualStream(x), norm, weight, None)
    assert total is x and torch.equal(out, naive.linear(normed(x, norm), weight, None))
    out, total = kernels.norm_linear_silu_and_mul(ResidualStream(x), norm, weight, None)
    assert total is x
    assert torch.equal(out, naive.linear_silu_and_mul(normed(x, norm), weight, None))
    assert [name for name, _ in recorder.calls] == ["linear", "linear_silu_and_mul"]


class SeparateNorms(CudaKernels):
    """Plain torch for what else is Triton's; counts norms."""

    norms = 0

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return NaiveKernels().silu_and_mul(gate_up)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
        self.norms += 1
        return NaiveKernels().rms_norm(x, weight, eps, one_plus=one_plus)

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[Tensor, Tensor]:
        self.norms += 1
        return NaiveKernels().fused_add_rms_norm(x, residual, weight, eps, one_plus=one_plus)


@pytest.mark.parametrize(
    ("tokens", "columns", "pending"),
    [
        pytest.param(3, 544, True, id="not added up"),
        pytest.param(9, 544, False, id="more tokens"),
        pytest.param(17, 544, False, id="many tokens"),
        pytest.param(3, 64, False, id="few columns"),
    ],
)
@pytest.mark.usefixtures("recorder")
def test_other_streams_have_a_norm_of_their_own(tokens: int, columns: int, pending: bool) -> None:
    torch.manual_seed(0)
    kernels, naive = SeparateNorms(HOPPER), NaiveKernels()
    x, branch = (torch.randn(tokens, columns).to(BF16) for _ in range(2))
    weight, norm = torch.randn(8, columns).to(BF16), norm_of(columns)
    stream = ResidualStream(x, branch if pending else None)
    expected = x + branch if pending else x
    out, total = kernels.norm_linear(stream, norm, weight, None)
    assert torch.equal(total, expected)
    assert torch.equal(out, naive.linear(normed(expected, norm), weight, None))
    out, total = kernels.norm_linear_silu_and_mul(stream, norm, weight, None)
    assert torch.equal(total, expected) and kernels.norms == 2
    assert torch.equal(out, naive.linear_silu_and_mul(normed(expected, norm), weight, None))


def test_few_tokens_are_added_by_the_matmul(recorder: Recorder) -> None:
    torch.manual_seed(0)
    kernels, naive = CudaKernels(HOPPER), NaiveKernels()
    weight = torch.randn(8, 64).to(BF16)
    for tokens, fused in ((3, True), (17, False)):
        x, residual = torch.randn(tokens, 64).to(BF16), torch.randn(tokens, 8).to(BF16)
        stream = kernels.linear_add(x, weight, None, residual)
        product = naive.linear(x, weight, None)
        if fused:
            assert stream.branch is None and torch.equal(stream.residual, residual + product)
        else:
            assert stream.residual is residual and torch.equal(stream.branch, product)
    assert len(recorder.calls) == 1
    assert not can_add(torch.randn(8, 3).to(BF16).T, weight)
    assert not can_add(torch.randn(3, 8), weight)


def test_the_launch_follows_from_the_weight() -> None:
    assert skinny_launch(2560, gated=False, norm=False) == FEW_ROWS
    for n, gated, norm in ((10240, False, False), (2560, True, False), (2560, False, True)):
        assert skinny_launch(n, gated=gated, norm=norm) == MANY_ROWS
