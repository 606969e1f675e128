# SPDX-License-Identifier: Apache-2.0
"""Ops that read and extend the residual stream are the norm, the matmul and the addition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm.kernels.cpu import CpuKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.residual_stream import Norm, ResidualStream

KERNELS = [
    (NaiveKernels, torch.float64),
    (NaiveKernels, torch.bfloat16),
    (CpuKernels, torch.float32),
    (CpuKernels, torch.bfloat16),
]


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize(("make", "dtype"), KERNELS)
def test_norm_linear(make: type[Kernels], dtype: torch.dtype, pending: bool, one_plus: bool):
    torch.manual_seed(0)
    kernels = make()
    x, branch = rows(5, 64, dtype=dtype), rows(5, 64, dtype=dtype)
    norm = Norm(rows(64, dtype=dtype), 1e-5, one_plus)
    weight, bias = rows(48, 64, dtype=dtype), rows(48, dtype=dtype)
    stream = ResidualStream(x, branch if pending else None)
    total = x + branch if pending else x
    normed = kernels.rms_norm(total, norm.weight, 1e-5, one_plus=one_plus)
    out, entered = kernels.norm_linear(stream, norm, weight, bias)
    assert torch.equal(entered, total)
    assert torch.equal(out, kernels.linear(normed, weight, bias))
    out, entered = kernels.norm_linear_silu_and_mul(stream, norm, weight, bias)
    assert torch.equal(entered, total)
    assert torch.equal(out, kernels.linear_silu_and_mul(normed, weight, bias))


@pytest.mark.parametrize(("make", "dtype"), KERNELS)
def test_linear_add(make: type[Kernels], dtype: torch.dtype) -> None:
    """Whoever reads the stream gets the rounded product plus the residual."""
    torch.manual_seed(0)
    kernels = make()
    x, residual = rows(5, 64, dtype=dtype), rows(5, 48, dtype=dtype)
    weight, bias = rows(48, 64, dtype=dtype), rows(48, dtype=dtype)
    norm = Norm(rows(48, dtype=dtype), 1e-6, False)
    stream = kernels.linear_add(x, weight, bias, residual)
    _, total = kernels.enter(stream, norm)
    assert torch.equal(total, residual + kernels.linear(x, weight, bias))
