# SPDX-License-Identifier: Apache-2.0
"""The CPU norms and gates against fp64."""

import pytest
import torch

from tests.kernels.cases import EPS, check, randn, strided
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.naive import NaiveKernels

KERNELS = CpuKernels()
# One rounding to the dtype, plus the norm's extra rounding before the weight.
TOLERANCE = {torch.float32: 4e-7, torch.bfloat16: 4e-3, torch.float16: 6e-4}
DTYPES = list(TOLERANCE)
WIDTHS = [1, 12, 16, 96, 640, 1000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("one_plus", [False, True])
def test_rms_norm_matches_fp64(dtype: torch.dtype, n: int, one_plus: bool) -> None:
    x = strided(randn(7, 3, n, dtype=dtype, device="cpu"))
    weight = randn(n, dtype=dtype, device="cpu")
    case = dict(x=x, weight=weight, eps=EPS, one_plus=one_plus)
    check(KERNELS, "rms_norm", case, TOLERANCE[dtype])


def test_rms_norm_takes_per_head_views_and_fp32_weights() -> None:
    qkv = randn(5, 4 * 2 * 32, dtype=torch.bfloat16, device="cpu")
    x = qkv.unflatten(-1, (4, 64))[..., :32]
    case = dict(x=x, weight=torch.randn(32), eps=EPS, one_plus=True)
    check(KERNELS, "rms_norm", case, TOLERANCE[torch.bfloat16])


def test_rms_norm_parallel_rows_equal_single_rows() -> None:
    x = torch.randn(400, 640)
    weight = torch.randn(640)
    whole = KERNELS.rms_norm(x, weight, EPS)
    rows = torch.cat([KERNELS.rms_norm(row[None], weight, EPS) for row in x])
    assert torch.equal(whole, rows)


def test_rms_norm_is_bit_equal_to_torch_in_bf16() -> None:
    x = randn(64, 640, dtype=torch.bfloat16, device="cpu")
    weight = randn(640, dtype=torch.bfloat16, device="cpu")
    wide = x.float()
    rounded = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).bfloat16()
    differing = (KERNELS.rms_norm(x, weight, EPS) != rounded * weight).float().mean()
    assert differing < 2e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("one_plus", [False, True])
def test_fused_add_rms_norm_matches_fp64(dtype: torch.dtype, n: int, one_plus: bool) -> None:
    case = dict(
        x=strided(randn(9, n, dtype=dtype, device="cpu")),
        residual=strided(randn(9, n, dtype=dtype, device="cpu")),
        weight=randn(n, dtype=dtype, device="cpu"),
        eps=EPS,
        one_plus=one_plus,
    )
    check(KERNELS, "fused_add_rms_norm", case, 2 * TOLERANCE[dtype])


def test_fused_add_rms_norm_rounds_the_sum_first() -> None:
    x, residual = (randn(9, 640, dtype=torch.bfloat16, device="cpu") for _ in range(2))
    weight = randn(640, dtype=torch.bfloat16, device="cpu")
    out, total = KERNELS.fused_add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, KERNELS.rms_norm(total, weight, EPS))
    assert total.data_ptr() not in (x.data_ptr(), residual.data_ptr())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [12, 24, 128])
@pytest.mark.parametrize("fp32_weight", [False, True])
def test_gated_rms_norm_matches_fp64(dtype: torch.dtype, n: int, fp32_weight: bool) -> None:
    case = dict(
        x=randn(6, 5, n, dtype=dtype, device="cpu"),
        gate=strided(randn(6, 5 * n, dtype=dtype, device="cpu")).unflatten(-1, (5, n)),
        weight=randn(n, dtype=torch.float32 if fp32_weight else dtype, device="cpu"),
        eps=EPS,
    )
    check(KERNELS, "gated_rms_norm", case, 1.5 * TOLERANCE[dtype])


def test_gated_rms_norm_leaves_rows_that_are_done() -> None:
    x, gate, out = (randn(5, 3, 16, dtype=torch.float32, device="cpu") for _ in range(3))
    weight, done = torch.ones(16), torch.tensor([3, -1, 0], dtype=torch.int32)
    before = out.clone()
    KERNELS.gated_rms_norm(x, gate, weight, EPS, out, done)
    expected = KERNELS.gated_rms_norm(x, gate, weight, EPS).view(out.shape)
    assert torch.equal(out[[0, 2]], before[[0, 2]])
    assert torch.equal(out[[1, 3, 4]], expected[[1, 3, 4]])


def test_gated_rms_norm_rounds_like_the_reference() -> None:
    x, gate = (randn(20, 5, 128, dtype=torch.bfloat16, device="cpu") for _ in range(2))
    weight = randn(128, dtype=torch.bfloat16, device="cpu")
    out = KERNELS.gated_rms_norm(x, gate, weight, EPS)
    differing = (out != NaiveKernels().gated_rms_norm(x, gate, weight, EPS)).float().mean()
    assert differing < 2e-3


def test_a_nan_of_any_payload_stays_nan_in_16_bits() -> None:
    weight = torch.full((20,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.ones(1, 20, dtype=dtype)
        assert KERNELS.rms_norm(x, weight, EPS, one_plus=True).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 40, 96, 2560])
def test_silu_and_mul_matches_fp64(dtype: torch.dtype, n: int) -> None:
    gate_up = strided(randn(5, 2 * n, dtype=dtype, device="cpu", scale=4.0))
    check(KERNELS, "silu_and_mul", dict(gate_up=gate_up), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [12, 256])
def test_mul_sigmoid_matches_fp64(dtype: torch.dtype, n: int) -> None:
    wide = randn(6, 4, 2 * n, dtype=dtype, device="cpu", scale=3.0)
    case = dict(x=randn(6, 4, n, dtype=dtype, device="cpu"), gate=wide[..., n:])
    check(KERNELS, "mul_sigmoid", case, TOLERANCE[dtype])


def test_exponential_is_accurate_over_its_whole_range() -> None:
    x = torch.cat([torch.linspace(-110, 95, 200_000), torch.tensor([0.0, -0.0, 88.7228, 1e30])])
    gate = torch.stack([-x, torch.ones_like(x)], dim=1).flatten(1)
    # silu(-x) * 1 = -x / (1 + e^x)
    out = KERNELS.silu_and_mul(gate)[:, 0]
    ref = torch.nn.functional.silu(-x.double())
    normal = ref.abs() > 2.7e-37  # below, e^x overflows in fp32
    ulps = ((out.double() - ref).abs() / ref.abs())[normal].max() / 2**-23
    assert ulps < 2.5
    assert (out[~normal].abs() <= 2.7e-37).all()


def test_special_values_pass_through() -> None:
    special = torch.tensor([[float("nan"), float("inf"), -1e30, 0.0] + [1.0] * 4])
    out = KERNELS.silu_and_mul(special)[0]
    assert out[0].isnan() and out[1] == float("inf") and out[2] == 0 and out[3] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_read_and_rounded_like_torch(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.cat([every] * 4)[None]
    residual = torch.cat([every.roll(shift) for shift in (0, 1, 1000, 20000)])[None]
    _, total = KERNELS.fused_add_rms_norm(x, residual, torch.ones(x.shape[-1]), EPS)
    expected = x + residual
    assert torch.equal(total.isnan(), expected.isnan())
    assert torch.equal(total.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    "x, message",
    [
        (torch.randn(4, 8, dtype=torch.float64), "rms_norm: x must be float32, bfloat16"),
        (torch.randn(8, 4).T, "rms_norm: x must be contiguous in its last dimension"),
        (torch.randn(4, 9), r"rms_norm: weight must have shape \[9\], got Float \[8\]"),
    ],
)
def test_wrong_arguments_are_named(x: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        KERNELS.rms_norm(x, torch.ones(8), EPS)


def test_wrong_weight_dtype_is_named() -> None:
    with pytest.raises(RuntimeError, match="rms_norm: weight must be float32"):
        KERNELS.rms_norm(torch.randn(4, 8), torch.ones(8, dtype=torch.int64), EPS)
    with pytest.raises(RuntimeError, match="silu_and_mul: gate_up must have an even"):
        KERNELS.silu_and_mul(torch.randn(4, 7))
