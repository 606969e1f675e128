# SPDX-License-Identifier: Apache-2.0
"""GeGLU's gate on every platform."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import TOLERANCE, check, error_ratio, randn, strided
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.naive import NaiveKernels


def test_definition() -> None:
    gate, up = torch.randn(2, 3, 4, dtype=torch.float64)
    u = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + u.tanh()) * up
    found = NaiveKernels().gelu_tanh_and_mul(torch.cat([gate, up], dim=1))
    assert error_ratio(found, expected) < 1e-14


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [1, 40, 2560])
def test_cpu(dtype: torch.dtype, n: int) -> None:
    gate_up = strided(randn(5, 2 * n, dtype=dtype, device="cpu", scale=4.0))
    check(CpuKernels(), "gelu_tanh_and_mul", dict(gate_up=gate_up), TOLERANCE[dtype])


def test_cpu_at_the_ends() -> None:
    """Large arguments, where the cube overflows, give the gate itself or nothing."""
    gate_up = torch.tensor([[float("nan"), 1e30, -1e30, 0.0] + [1.0] * 4])
    out = CpuKernels().gelu_tanh_and_mul(gate_up)[0]
    assert out[0].isnan() and out[1] == 1e30 and out[2] == 0 and out[3] == 0


def test_cpu_refuses_odd_rows() -> None:
    with pytest.raises(RuntimeError, match="gelu_tanh_and_mul: gate_up must have an even"):
        CpuKernels().gelu_tanh_and_mul(torch.randn(4, 7))


@pytest.mark.parametrize("n", [40, 1100])
def test_triton(n: int, dtype: torch.dtype, device: str) -> None:
    gate_up = strided(randn(3, 2 * n, dtype=dtype, device=device, scale=4.0))
    check(CudaKernels(), "gelu_tanh_and_mul", dict(gate_up=gate_up), TOLERANCE[dtype])
