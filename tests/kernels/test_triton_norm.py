# SPDX-License-Identifier: Apache-2.0
"""Triton norms and gates against the fp64 reference."""

import pytest
import torch

from tests.kernels.cases import TOLERANCE, check, randn, strided
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.naive import NaiveKernels

kernels = CudaKernels()


@pytest.mark.parametrize("shape", [(7, 2560), (5, 3, 24), (33, 2, 128), (48,), (0, 64)])
@pytest.mark.parametrize("one_plus", [False, True])
def test_rms_norm(shape, one_plus, dtype, device):
    x = strided(randn(*shape, dtype=dtype, device=device, scale=3.0))
    w = randn(shape[-1], dtype=dtype, device=device)
    if x.numel():
        check(kernels, "rms_norm", dict(x=x, weight=w, eps=1e-6, one_plus=one_plus),
              TOLERANCE[dtype])  # fmt: skip
    else:
        assert kernels.rms_norm(x, w, 1e-6).shape == x.shape


@pytest.mark.parametrize("one_plus", [False, True])
def test_roundings_are_those_of_the_definition(one_plus, device):
    """Bitwise equal to plain torch but for rare last-bit differences of the statistics."""
    x, w = (randn(*s, dtype=torch.float16, device=device) for s in ((64, 96), (96,)))
    out = kernels.rms_norm(x, w, 1e-6, one_plus=one_plus)
    ref = NaiveKernels().rms_norm(x, w, 1e-6, one_plus=one_plus)
    assert (out == ref).double().mean() > 0.995


@pytest.mark.parametrize("n", [24, 2560])
def test_fused_add_rms_norm(n, dtype, device):
    case = dict(
        x=strided(randn(9, n, dtype=dtype, device=device)),
        residual=strided(randn(9, n, dtype=dtype, device=device), 16),
        weight=randn(n, dtype=dtype, device=device, scale=0.3),
        eps=1e-5,
        one_plus=True,
    )
    check(kernels, "fused_add_rms_norm", case, TOLERANCE[dtype])
    _, total = kernels.fused_add_rms_norm(**case)
    assert torch.equal(total, case["x"] + case["residual"])


@pytest.mark.parametrize("shape", [(5, 3, 24), (40, 2, 128)])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_gated_rms_norm(shape, weight_dtype, dtype, device):
    case = dict(
        x=randn(*shape, dtype=dtype, device=device),
        gate=strided(randn(*shape, dtype=dtype, device=device)),
        weight=randn(shape[-1], dtype=weight_dtype or dtype, device=device),
        eps=1e-6,
    )
    check(kernels, "gated_rms_norm", case, TOLERANCE[dtype])


@pytest.mark.parametrize("n", [20, 1500])
def test_silu_and_mul(n, dtype, device):
    gate_up = strided(randn(6, 2 * n, dtype=dtype, device=device, scale=4.0))
    check(kernels, "silu_and_mul", dict(gate_up=gate_up), TOLERANCE[dtype])


@pytest.mark.parametrize("n", [20, 1500])
def test_relu_squared(n, dtype, device):
    x = strided(randn(6, n, dtype=dtype, device=device, scale=4.0))
    check(kernels, "relu_squared", dict(x=x), TOLERANCE[dtype])
    x[1, 1] = torch.nan
    assert kernels.relu_squared(x).isnan().sum() == 1


@pytest.mark.parametrize("done", [[], [2, -1, 0, -1], [0, 1, 2, -1, -1, 3, -1]])
def test_gated_rms_norm_leaves_rows_that_are_done(done, device):
    x, gate, out = (randn(7, 3, 32, dtype=torch.float32, device=device) for _ in range(3))
    weight = randn(32, dtype=torch.float32, device=device)
    before, rows = out.clone(), [i for i, index in enumerate(done) if index >= 0]
    done = torch.tensor(done, dtype=torch.int32, device=device)
    case = dict(x=x, gate=gate, weight=weight, eps=1e-6, out=out, done=done)
    check(kernels, "gated_rms_norm", case, TOLERANCE[torch.float32])
    assert torch.equal(out[rows], before[rows])
    assert (out == before).flatten(1).all(1).sum() == len(rows)


def test_mul_sigmoid_takes_the_gate_of_a_packed_projection(dtype, device):
    packed = randn(9, 3, 2, 24, dtype=dtype, device=device)
    x = randn(9, 3, 24, dtype=dtype, device=device)
    check(kernels, "mul_sigmoid", dict(x=x, gate=packed[:, :, 1]), TOLERANCE[dtype])
