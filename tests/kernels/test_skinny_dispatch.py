# SPDX-License-Identifier: Apache-2.0
"""When few tokens are multiplied by `vllm_cuda`, and when by cuBLAS."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from vllm import decisions
from vllm.kernels import cuda, skinny
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.skinny import SkinnyOps, find_skinny_ops, is_skinny
from vllm.kernels.skinny_launch import FEW_ROWS, MANY_ROWS, skinny_launch

BF16 = torch.bfloat16


class Recorder:
    """Ops that note how they were called and compute in plain torch."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.ops = SkinnyOps(self.linear, self.linear_silu_and_mul)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: bool) -> Tensor:
        self.calls.append(("linear", overlap))
        return torch.nn.functional.linear(x, weight, bias)

    def linear_silu_and_mul(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: bool
    ) -> Tensor:
        self.calls.append(("linear_silu_and_mul", overlap))
        return NaiveKernels().silu_and_mul(torch.nn.functional.linear(x, weight, bias))


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
def test_what_is_not_skinny_goes_to_torch(x: Tensor, weight: Tensor) -> None:
    assert not is_skinny(x, weight)
    recorder = Recorder()
    out = CudaKernels(recorder.ops).linear(x, weight, None)
    assert torch.equal(out, torch.nn.functional.linear(x, weight)) and not recorder.calls


@pytest.mark.parametrize("capturing", [False, True])
def test_launches_overlap_in_graphs_only(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    monkeypatch.setattr(cuda.torch.cuda, "is_current_stream_capturing", lambda: capturing)
    recorder = Recorder()
    kernels = CudaKernels(recorder.ops)
    x, weight, bias = ones(3, 64), ones(8, 64), ones(8)
    assert kernels.linear(x, weight, bias).tolist() == [[65.0] * 8] * 3
    assert kernels.linear_silu_and_mul(x, weight, bias).tolist() == [[4224.0] * 4] * 3
    assert recorder.calls == [("linear", capturing), ("linear_silu_and_mul", capturing)]


@pytest.mark.parametrize(
    ("capability", "built", "chosen", "why"),
    [
        ((8, 9), True, "cuBLAS", "9.0, this GPU has (8, 9)"),
        ((9, 0), False, "cuBLAS", "_C_cuda.so is not built: see VLLM_TARGET_DEVICE=cuda"),
        ((9, 0), True, "vllm_cuda", "memory's speed"),
        ((10, 0), True, "vllm_cuda", "memory's speed"),
    ],
)
def test_the_choice_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int],
    built: bool,
    chosen: str,
    why: str,
) -> None:
    library = tmp_path / "_C_cuda.so"
    if built:
        library.touch()
    loaded: list[None] = []
    monkeypatch.setattr(skinny, "CUDA_LIBRARY", library)
    monkeypatch.setattr(skinny, "load_cuda_ops", lambda: loaded.append(None))
    assert (find_skinny_ops(capability) is not None) == (chosen == "vllm_cuda")
    assert len(loaded) == (chosen == "vllm_cuda")
    (decision,) = [d for d in decisions.decisions() if d.what == skinny.WHAT]
    assert decision.chosen == chosen and why in decision.why


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


def test_the_launch_follows_from_the_weight() -> None:
    assert skinny_launch(2560, gated=False) == FEW_ROWS
    assert skinny_launch(10240, gated=False) == skinny_launch(2560, gated=True) == MANY_ROWS
