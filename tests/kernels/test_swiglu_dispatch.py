# SPDX-License-Identifier: Apache-2.0
"""When gate, up projection and SiLU are one launch of `vllm_cuda`, and of which shape."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vllm.kernels import cuda_library
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER, CudaOps
from vllm.kernels.linear import swiglu
from vllm.kernels.linear.swiglu import SHAPES, Shape, is_faster, swiglu_launch, takes_swiglu
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.residual_stream import Norm, ResidualStream

BF16 = torch.bfloat16
H200 = 132


class Recorder:
    """The op in plain torch; notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, x: Tensor, weight: Tensor, overlap: bool) -> Tensor:
        self.calls.append((len(x), overlap))
        return NaiveKernels().linear_silu_and_mul(x, weight, None)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The op of `CudaKernels(HOPPER)`."""
    recorder = Recorder()
    monkeypatch.setattr(swiglu, "swiglu", recorder)
    monkeypatch.setattr(CudaOps, "choose", lambda ops, capability: ops is swiglu.OPS)
    return recorder


class PlainRest(CudaKernels):
    """Plain torch for what else is Triton's."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return NaiveKernels().silu_and_mul(gate_up)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
        return NaiveKernels().rms_norm(x, weight, eps, one_plus=one_plus)


@pytest.fixture(autouse=True)
def _not_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of torch without CUDA cannot even be asked."""
    monkeypatch.setattr(cuda_library.torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights, so that they can be multiplied here."""
    monkeypatch.setattr(swiglu, "is_faster", lambda m, n, k: m >= 128 and n < 100 and k < 100)


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


X, WEIGHT = ones(300, 64), ones(16, 64)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        pytest.param(X, WEIGHT, id="dense"),
        pytest.param(ones(128, 80)[:, 8:72], WEIGHT, id="slice of a wider tensor"),
        pytest.param(ones(300, 72), ones(48, 72), id="k that ends within a step"),
    ],
)
def test_taken(x: Tensor, weight: Tensor) -> None:
    assert takes_swiglu(x, weight, None)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        pytest.param(X, WEIGHT, ones(16), id="bias"),
        pytest.param(X.half(), WEIGHT.half(), None, id="fp16"),
        pytest.param(X.float(), WEIGHT.float(), None, id="fp32"),
        pytest.param(X[:127], WEIGHT, None, id="few tokens"),
        pytest.param(X, ones(208, 64), None, id="many outputs"),
        pytest.param(ones(300, 104), ones(16, 104), None, id="many columns"),
        pytest.param(X.as_strided((300, 1, 64), (64, 1, 1)), WEIGHT, None, id="three dimensions"),
        pytest.param(X, ones(24, 64), None, id="outputs of no multiple of 16 bytes"),
        pytest.param(ones(300, 60), ones(16, 60), None, id="rows of no multiple of 16 bytes"),
        pytest.param(ones(300, 68)[:, :64], WEIGHT, None, id="token stride"),
        pytest.param(ones(300, 72)[:, 4:68], WEIGHT, None, id="token offset"),
        pytest.param(ones(300, 128)[:, ::2], WEIGHT, None, id="every other column"),
        pytest.param(X, ones(16, 128)[:, :64], None, id="strided weight"),
        pytest.param(X, ones(16 * 64 + 4)[4:].view(16, 64), None, id="weight at 8 bytes"),
    ],
)
def test_not_taken(recorder: Recorder, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert not takes_swiglu(x, weight, bias)
    if x.dim() == 2 and x.stride(1) == 1:
        out = PlainRest(HOPPER).linear_silu_and_mul(x, weight, bias)
        assert torch.equal(out, NaiveKernels().linear_silu_and_mul(x, weight, bias))
        assert not recorder.calls


@pytest.mark.parametrize("capturing", [False, True])
def test_many_tokens_are_one_launch(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    monkeypatch.setattr(cuda_library.torch.cuda, "is_current_stream_capturing", lambda: capturing)
    torch.manual_seed(0)
    naive = NaiveKernels()
    kernels = PlainRest(HOPPER)
    x, weight = torch.randn(140, 64).to(BF16), torch.randn(16, 64).to(BF16)
    expected = naive.linear_silu_and_mul(x, weight, None)
    assert torch.equal(kernels.linear_silu_and_mul(x, weight, None), expected)
    norm = Norm(torch.ones(64, dtype=BF16), 1e-6, one_plus=False)
    out, total = kernels.norm_linear_silu_and_mul(ResidualStream(x), norm, weight, None)
    normed = naive.rms_norm(x, norm.weight, norm.eps)
    assert total is x and torch.equal(out, naive.linear_silu_and_mul(normed, weight, None))
    assert recorder.calls == [(140, capturing)] * 2
    assert torch.equal(PlainRest().linear_silu_and_mul(x, weight, None), expected)


def test_time_counts_waves_of_whole_tiles() -> None:
    shape = Shape(128, 64, 1.0, rows=2)
    assert shape.grid(257, 65) == (2, 2)
    # four clusters of two, two at a time
    assert shape.time(257, 65, 5) == 2 * 128 * 64
    assert shape.time(257, 65, 8) == 128 * 64
    wide = Shape(128, 64, 1.5, columns=2)
    assert wide.grid(257, 65) == (3, 1) and wide.time(257, 65, 4) == 2 * 128 * 64 * 1.5


def test_no_shape_takes_less_time_than_the_chosen() -> None:
    for m in (128, 129, 256, 300, 512, 1024, 2048, 8192, 100_000):
        variant, group = swiglu_launch(m, 9216, H200)
        times = [shape.time(m, 9216, H200) for shape in SHAPES]
        assert times[variant] == min(times)
        assert group * SHAPES[variant].tokens * SHAPES[variant].rows == swiglu.CACHED_TOKENS


def test_the_compiled_shapes_are_these() -> None:
    source = Path(__file__).parents[2] / "csrc" / "cuda" / "hopper" / "swiglu.cu"
    listed = source.read_text().split("using Compiled")[1].split(";")[0]
    compiled = re.findall(r"Shape<(\d+), (\d+), \d+, (\d+), (\d+)>", listed)
    assert [tuple(map(int, found)) for found in compiled] == [
        (shape.tokens, shape.outputs, shape.rows, shape.columns) for shape in SHAPES
    ]


@pytest.mark.parametrize(
    ("n", "k", "fast", "slow"),
    [
        (9216, 2560, (512, 640, 1024, 2047, 2048, 8192), (64, 128, 256, 384, 511)),
        (12288, 4096, (512, 1024, 2048, 8192), (64, 384, 511)),
        (3072, 1024, (1536, 2048, 8192), (64, 512, 1535)),
        (3064, 1024, (), (2048, 8192)),
        (9216, 1016, (), (64, 2048, 8192)),
        (12288, 4104, (), (2048, 8192)),
    ],
)
def test_sizes_at_which_it_was_measured_to_be_faster(
    n: int, k: int, fast: tuple[int, ...], slow: tuple[int, ...]
) -> None:
    assert [m for m in fast + slow if is_faster(m, n, k)] == list(fast)


def test_tiles_that_leave_the_device_idle_are_left_to_cublas() -> None:
    """513 tokens are five rows of tiles, the last of one token."""
    assert [m for m in (512, 513, 527, 528) if is_faster(m, 9216, 2560)] == [512, 528]


def test_the_shapes_of_qwen() -> None:
    """One wave where the tokens fit a tile; the shape that wastes least of many waves."""
    wide, tall, small = SHAPES
    assert wide.tokens * wide.outputs < tall.tokens * tall.outputs
    chosen = {m: SHAPES[swiglu_launch(m, 9216, H200)[0]] for m in (128, 256, 384, 1024, 2048, 8192)}
    assert chosen == {128: small, 256: tall, 384: small, 1024: tall, 2048: wide, 8192: wide}
