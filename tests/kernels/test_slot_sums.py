# SPDX-License-Identifier: Apache-2.0
"""The sum over a token's slots: against the reference, and inside a norm with the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCE, error_ratio, randn, strided
from tests.kernels.test_moe import experts_problem, wide
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.moe import naive
from vllm.kernels.moe.slots import SlotOutputs
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.residual_stream import Norm

EXPERTS, SLOTS = 6, 3


def slot_outputs(
    tokens: int, hidden: int, device: str, dtype: torch.dtype, *, shared: bool, ranks: int = 1
) -> SlotOutputs:
    """Some slots' experts are not in the stack; what lies at their places is no number."""
    sizes = (EXPERTS, hidden, 4)
    problem = experts_problem(tokens, device, dtype, sizes=sizes, slots=SLOTS, shared=shared)
    experts = problem.routing.experts
    experts[::3, 1] = -1
    experts[1::4, 0] = EXPERTS
    experts[tokens - 1] = 2**31 - 1
    outputs = randn(tokens, SLOTS, hidden, dtype=dtype, device=device)
    chosen = problem.experts
    outputs[(chosen < 0) | (chosen >= EXPERTS)] = torch.nan
    return SlotOutputs(replace(problem, ranks=ranks), outputs.flatten(0, 1))


def expected_sum(slots: SlotOutputs) -> Tensor:
    problem = wide(slots.problem)
    outputs = slots.outputs.double().nan_to_num(0.0)
    return naive.add_slots(problem, outputs.unflatten(0, problem.experts.shape))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (9, 1048)])
def test_sum(
    tokens: int, hidden: int, shared: bool, ranks: int, device: str, dtype: torch.dtype
) -> None:
    slots = slot_outputs(tokens, hidden, device, dtype, shared=shared, ranks=ranks)
    found = slots.sum()
    assert found.dtype == dtype and found.is_contiguous()
    assert error_ratio(found, expected_sum(slots)) < TOLERANCE[dtype]
    if not shared:
        assert (found[-1] == 0).all()


@pytest.mark.parametrize(
    ("shared", "ranks", "one_plus"), [(False, 1, True), (True, 1, False), (True, 2, True)]
)
@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [(1, 64), (9, 1048), *(pytest.param(*s, marks=pytest.mark.gpu) for s in
     [(1, 2048), (8, 2048), (300, 2048), (40, 2880), (17, 7168)])],
)  # fmt: skip
def test_the_norm_adds_slots_with_the_bits_of_separate_launches(
    tokens: int,
    hidden: int,
    shared: bool,
    ranks: int,
    one_plus: bool,
    device: str,
    dtype: torch.dtype,
) -> None:
    slots = slot_outputs(tokens, hidden, device, dtype, shared=shared, ranks=ranks)
    residual = strided(randn(tokens, hidden, dtype=dtype, device=device), 16)
    norm = Norm(randn(hidden, dtype=dtype, device=device), 1e-6, one_plus)
    normed, total = slots.sum_add_norm(residual, norm)
    assert torch.equal(total, slots.sum() + residual)
    expected = CudaKernels().fused_add_rms_norm(
        slots.sum(), residual, norm.weight, norm.eps, one_plus=one_plus
    )
    assert torch.equal(normed, expected[0]) and torch.equal(total, expected[1])


@pytest.mark.parametrize("make", [NaiveKernels, CpuKernels, CudaKernels])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_experts_are_a_branch_of_the_stream(make: type[Kernels], tokens: int, device: str) -> None:
    if make is CpuKernels and device != "cpu":
        pytest.skip("the CPU's kernels read host memory")
    kernels = make()
    problem = experts_problem(tokens, device, torch.float32, shared=True)
    residual = randn(*problem.x.shape, dtype=torch.float32, device=device)
    norm = Norm(randn(residual.shape[1], dtype=torch.float32, device=device), 1e-6, True)
    stream = kernels.run_experts_add(problem, residual)
    branch = kernels.run_experts(problem)
    normed, total = kernels.enter(stream, norm)
    assert torch.equal(total, residual + branch) and torch.equal(stream.total, total)
    assert stream.added_branch is not None and torch.equal(stream.added_branch, branch)
    expected = kernels.rms_norm(total, norm.weight, norm.eps, one_plus=True)
    torch.testing.assert_close(normed, expected)
