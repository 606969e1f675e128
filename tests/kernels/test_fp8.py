# SPDX-License-Identifier: Apache-2.0
"""Float8 quantisation and products: the definition against fp64, the kernels against it."""

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import error_ratio, randn, strided
from vllm.kernels import fp8
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.fp8 import skinny
from vllm.kernels.fp8.quantize import quantize_groups, quantize_rows
from vllm.kernels.interface import Kernels
from vllm.kernels.linear.cpu import skinny_linear
from vllm.kernels.naive import NaiveKernels

# Sums in fp32, results rounded once.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# Hopper's tensor cores sum float8 products to about 14 bits (arXiv 2412.19437, section 3.3.2).
TENSOR_CORES = 1e-3


def bound(dtype: torch.dtype, device: str) -> float:
    """The error ratio of a product on `device`."""
    return max(TOLERANCE[dtype], TENSOR_CORES) if device == "cuda" else TOLERANCE[dtype]


def exact_in_fp8(rows: int, columns: int) -> Tensor:
    """Values that quantise without rounding, by token or by group: the interpreter rounds wrongly.

    Every 128 channels hold 448 times the token's power of two.
    """
    values = torch.randn(rows, columns).mul(30).clamp(-448, 448).to(fp8.FP8).float()
    values[:, ::128] = 448.0
    return values * torch.linspace(-4, 0, rows).round().exp2()[:, None]


def all_codes() -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.FP8)
    return codes[~codes.float().isnan()]


def activations(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """Ordinary numbers where rounding can be trusted, a zero row among them."""
    x = exact_in_fp8(rows, columns) if device == "cpu" else torch.randn(rows, columns) * 3
    if rows > 1:
        x[1] = 0.0
    return strided(x.to(dtype).to(device), 16)


def expected_rows(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, fixed: Tensor | None
) -> Tensor:
    """fp64 products of what the definition quantises."""
    if fixed is None:
        values, x_scale = fp8.quantize_rows(x)
    else:
        values, x_scale = fp8.quantize_by(x, fixed), fixed
    return values.double() @ weight.double().T * x_scale.double() * scale.double() + bias.double()


def expected_groups(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    values, x_scale = fp8.quantize_groups(x)
    k = x.shape[1]
    wide = values.double() * x_scale.double().repeat_interleave(128, 1)[:, :k]
    return wide @ (weight.double() * scale.double().T.repeat_interleave(128, 1)[:, :k]).T + bias


def weights(n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    weight, scale = fp8.quantize_rows(
        torch.randn(n, k) * torch.logspace(-2, 0, n)[:, None] / k**0.5
    )
    bias = randn(n, dtype=dtype, device=device)
    return weight.to(device), scale[:, 0].contiguous().to(device), bias


def test_quantising_reaches_the_largest_value_and_rounds_to_the_nearest() -> None:
    x = torch.randn(5, 300) * torch.logspace(-30, 30, 5)[:, None]
    x[2] = 0
    values, scale = fp8.quantize_rows(x)
    assert values.float().abs().amax(1).tolist() == [448, 448, 0, 448, 448] and scale[2] == 1
    table = all_codes().double()
    scaled = x.double() / scale
    nearest = (scaled[..., None] - table).abs().amin(-1)
    # the product by a rounded inverse may be one fp32 place from the quotient
    assert ((values.double() - scaled).abs() <= nearest * (1 + 1e-5) + 1e-4).all()


def test_groups_are_rows_of_128_channels() -> None:
    x = torch.randn(3, 300)
    values, scale = fp8.quantize_groups(x)
    for group, part in enumerate(x.split(128, 1)):
        expected, part_scale = fp8.quantize_rows(part)
        found = values[:, group * 128 : group * 128 + part.shape[1]]
        assert torch.equal(found.float(), expected.float())
        assert torch.equal(scale[:, group : group + 1], part_scale)


def test_saturation_and_nan() -> None:
    values = fp8.to_fp8(torch.tensor([1e9, -500.0, float("nan"), 448.0, 2.0**-9])).float()
    assert values[[0, 1, 3, 4]].tolist() == [448, -448, 448, 2.0**-9] and values[2].isnan()


def test_cpu_product_reads_every_code() -> None:
    """Also in the lanes of a ragged end."""
    weight = all_codes().repeat(3)[None, :701].contiguous()
    out = skinny_linear(torch.eye(701), weight, None)
    assert torch.equal(out[:, 0], weight[0].float())
    nan = torch.full((1, 40), float("nan")).to(fp8.FP8)
    assert skinny_linear(torch.ones(1, 40), nan, None).isnan().all()
    with pytest.raises(RuntimeError, match="x must be float32 with a float8 weight"):
        skinny_linear(torch.ones(1, 701).bfloat16(), weight, None)


@pytest.mark.parametrize("kernels", [NaiveKernels(), CpuKernels()])
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 40])
def test_products_on_the_cpu(kernels: Kernels, act: torch.dtype, rows: int) -> None:
    x = strided(torch.randn(rows, 300).to(act))
    weight, scale, bias = weights(96, 300, act, "cpu")
    for fixed in (None, torch.tensor([0.01])):
        out = kernels.linear_fp8(x, weight, scale, bias, input_scale=fixed)
        assert out.dtype is act
        assert error_ratio(out, expected_rows(x, weight, scale, bias, fixed)) < TOLERANCE[act]
    blocks = torch.rand(3, 96) + 0.5
    out = kernels.linear_fp8_block(x, weight, blocks, None)
    exact = expected_groups(x, weight, blocks, torch.zeros(96))
    assert error_ratio(out, exact) < TOLERANCE[act]


@pytest.mark.parametrize("shape", [(1, 200), (6, 256), (70, 384)])
def test_triton_quantisation_is_the_definition_bit_for_bit(shape, dtype, device):
    x = activations(*shape, dtype, device)
    for found, expected in (
        (quantize_rows(x), fp8.quantize_rows(x)),
        (quantize_groups(x), fp8.quantize_groups(x)),
    ):
        for out, ref in zip(found, expected, strict=True):
            assert torch.equal(out[: shape[0]].float(), ref.float())
            assert not out[shape[0] :, :0].any()
    fixed = torch.tensor([0.125], device=device)
    values, scale = quantize_rows(x, fixed)
    assert torch.equal(values.float(), fp8.quantize_by(x, fixed).float())
    assert scale.tolist() == [[0.125]] * shape[0]


def assert_mostly_equal(found: fp8.Fp8Rows, expected: fp8.Fp8Rows, device: str) -> None:
    """But for last bits of what is quantised, and for the interpreter's wrong carries."""
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-3, atol=0)
    same = (found.values.float() == expected.values.float()).double().mean()
    assert same > (0.9 if device == "cpu" else 0.995)


@pytest.mark.parametrize("shape", [(1, 200), (5, 384)])
def test_fused_quantisation_is_that_of_the_separate_ops(shape, dtype, device):
    kernels, naive = CudaKernels(), NaiveKernels()
    x = activations(*shape, dtype, device)
    gate_up = torch.cat([torch.full_like(x, 80.0), x / 80], 1)
    found = kernels.silu_and_mul_fp8(gate_up)
    expected = naive.silu_and_mul_fp8(gate_up)
    assert_mostly_equal(found, expected, device)
    weight = torch.ones(shape[1], dtype=dtype, device=device)
    rows, total = kernels.fused_add_rms_norm_fp8(x, x, weight, 1e-6)
    expected, expected_total = naive.fused_add_rms_norm_fp8(x, x, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert_mostly_equal(rows, expected, device)


@pytest.mark.parametrize("grouped", [False, True])
def test_long_sums_are_split(grouped, dtype, device):
    """Two programs per weight row, joined; how many does not depend on the tokens."""
    x = activations(3, 2048, dtype, device)
    weight, scale, bias = weights(40, 2048, dtype, device)
    if grouped:
        scale = (torch.rand(16, 40) + 0.5).to(device) / 2048
        expected = expected_groups(x, weight, scale, bias)
        values, x_scale = quantize_groups(x)
    else:
        expected = expected_rows(x, weight, scale, bias, None)
        values, x_scale = quantize_rows(x)
    out = torch.full((3, 40), float("nan"), dtype=dtype, device=device)
    alone = torch.full_like(out[:1], float("nan"))
    skinny.skinny_matmul(values, x_scale, weight, scale, bias, out)
    assert error_ratio(out, expected) < bound(dtype, device)
    skinny.skinny_matmul(values[2:3], x_scale[2:3], weight, scale, bias, alone)
    assert torch.equal(alone, out[2:])


@pytest.mark.parametrize("rows", [1, 6, 70])
@pytest.mark.parametrize("n,k", [(40, 200), (144, 512)])
def test_triton_products(rows, n, k, dtype, device):
    """Shapes that cuBLAS does not take, and in bf16 on a GPU one that it does."""
    x = activations(rows, k, dtype, device)
    weight, scale, bias = weights(n, k, dtype, device)
    kernels = CudaKernels()
    for fixed in (None, torch.tensor([0.125], device=device)):
        out = kernels.linear_fp8(x, weight, scale, bias, input_scale=fixed)
        ref = expected_rows(x, weight, scale, bias, fixed)
        assert error_ratio(out, ref) < bound(dtype, device)
    ready = fp8.Fp8Rows(*quantize_rows(x), dtype)
    out = kernels.linear_fp8(ready, weight, scale, bias)
    assert error_ratio(out, expected_rows(x, weight, scale, bias, None)) < bound(dtype, device)
    blocks = (torch.rand(-(-k // 128), n) + 0.5).to(device) / k
    out = kernels.linear_fp8_block(x, weight, blocks, bias)
    assert error_ratio(out, expected_groups(x, weight, blocks, bias)) < bound(dtype, device)
