# SPDX-License-Identifier: Apache-2.0
"""The CPU linear against fp64, and its rows against the rows alone."""

import pytest
import torch

from tests.kernels.cases import error_ratio, randn, strided
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.linear.cpu import skinny_linear

KERNELS = CpuKernels()
# One unit roundoff of the dtype; fp32 also accumulates.
TOLERANCE = {torch.float32: 4e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = list(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 7, 8, 15])
@pytest.mark.parametrize("n, k", [(1, 1), (5, 30), (24, 64), (71, 100), (300, 640)])
@pytest.mark.parametrize("bias", [False, True])
def test_skinny_linear_matches_fp64(
    dtype: torch.dtype, rows: int, n: int, k: int, bias: bool
) -> None:
    x = strided(randn(rows, k, dtype=dtype, device="cpu"))
    weight = strided(randn(n, k, dtype=dtype, device="cpu"))
    offset = randn(n, dtype=dtype, device="cpu") if bias else None
    out = skinny_linear(x, weight, offset)
    ref = torch.nn.functional.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )
    assert out.shape == ref.shape and out.dtype == dtype
    magnitude = x.double().abs() @ weight.double().abs().T
    if offset is not None:
        magnitude += offset.double().abs()
    assert ((out.double() - ref).abs() <= TOLERANCE[dtype] * magnitude).all()
    if rows * n > 500:
        assert error_ratio(out, ref) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [640, 100])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, k: int) -> None:
    x, weight = (randn(n, k, dtype=dtype, device="cpu") for n in (29, 75))
    bias = randn(75, dtype=dtype, device="cpu")
    whole = skinny_linear(x, weight, bias)
    for size in (1, 2, 3, 4, 8, 13):
        for start in range(0, 29 - size, 5):
            part = skinny_linear(x[start : start + size], weight, bias)
            assert torch.equal(part, whole[start : start + size])


def test_nan_stays_in_its_row_and_column() -> None:
    x, weight = torch.randn(9, 50), torch.randn(30, 50)
    x[4, 7] = float("nan")
    weight[3, 49] = float("nan")
    out = skinny_linear(x, weight, None)
    expected = torch.zeros(9, 30, dtype=torch.bool)
    expected[4], expected[:, 3] = True, True
    assert torch.equal(out.isnan(), expected)


def test_wrong_arguments_are_named() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    for message, arguments in {
        r"weight must have shape \[any, 8\]": (x, weight[:, :7], None),
        "weight must have the activations' dtype": (x, weight.bfloat16(), None),
        "weight must be dense": (x, torch.randn(8, 4).T, None),
        r"bias must have shape \[4\]": (x, weight, torch.randn(5)),
        "x must be float32, bfloat16 or float16": (x.double(), weight, None),
    }.items():
        with pytest.raises(RuntimeError, match=f"skinny_linear: {message}"):
            skinny_linear(*arguments)
