# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule with `beta` up to 2, on every platform against the fp64 recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import Case, check, gdn_case, gdn_decode_case
from tests.kernels.journals import Layers, both_ways, two_layers
from tests.kernels.test_hopper_gdn_decode_dispatch import problem as taken_decode
from tests.kernels.test_hopper_gdn_dispatch import problem as taken_factors
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper import takes_factors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper_decode import takes_decode
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import gdn_gates

HEADS = (2, 4, 12, 24)


def prefill(device: str) -> Case:
    case = gdn_case([70, 3], [True, False], HEADS, torch.float32, device)
    # Gates that open: most of the betas are above 1.
    return case | dict(beta_scale=2.0, b=case["b"] + 1)


def decode(device: str) -> Case:
    case = gdn_decode_case(3, HEADS, torch.float32, device)
    return case | dict(beta_scale=2.0, b=case["b"] + 1)


def test_gates() -> None:
    a, b, A_log, dt_bias = torch.randn(4, 5, dtype=torch.float64)
    g, beta = gdn_gates(a, b, A_log, dt_bias, 2.0)
    plain, half = gdn_gates(a, b, A_log, dt_bias)
    assert torch.equal(g, plain)
    assert torch.equal(beta, 2 * half)


def test_cpu() -> None:
    check(CpuKernels(), "gdn_prefill", prefill("cpu"), 5e-6)
    check(CpuKernels(), "gdn_decode", decode("cpu"), 1e-5)


def test_triton(device: str) -> None:
    check(CudaKernels(), "gdn_prefill", prefill(device), 1e-5)
    check(CudaKernels(), "gdn_decode", decode(device), 1e-5)


@pytest.mark.parametrize("kernels", [NaiveKernels(), CpuKernels()], ids=["naive", "cpu"])
def test_journals_keep_the_bits(kernels: Kernels) -> None:
    layers = two_layers(3, HEADS, torch.float32, "cpu")
    layers = Layers([case | dict(beta_scale=2.0) for case in layers.cases])
    assert both_ways(kernels, layers, HEADS, 5)


def test_hopper_leaves_it_to_triton() -> None:
    step, chunks = taken_decode(), taken_factors()
    assert takes_decode(step) and takes_factors(chunks)
    assert not takes_decode(replace(step, beta_scale=2.0))
    assert not takes_factors(replace(chunks, beta_scale=2.0))
