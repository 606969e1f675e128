# SPDX-License-Identifier: Apache-2.0
"""What a narrower recurrent state costs, against the same recurrence in fp64.

Every write rounds the state to nearest, by at most u = 2^-9 of each entry in bf16 (2^-25 in fp32).
Roundings of different steps are independent and nothing amplifies an older one: decays are at most
1 and the delta rule's `I - beta k k^T` is a contraction for unit keys and beta <= 1. So after n
writes the relative error stays below sqrt(n) u, where truncating instead would give n u. With the
decays near 1 used here hardly anything is forgotten, which is the worst case.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import Case, conv_case, error_ratio, gdn_case, gdn_decode_case
from vllm.kernels.chunks import chunk_metadata
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill

HEADS = (2, 4, 32, 32)
UNIT = {torch.float32: 2.0**-25, torch.bfloat16: 2.0**-9}
#: what fp32 arithmetic adds, whatever the dtype of the state
ARITHMETIC = 1e-5
NUM_STEPS = 64
NUM_CHUNKS = 9


@pytest.fixture(params=["cpp", "triton"])
def kernels(request: pytest.FixtureRequest, device: str) -> Kernels:
    if (request.param == "cpp") != (device == "cpu"):
        pytest.skip("C++ kernels run on the CPU; the interpreter truncates bf16 stores")
    return CpuKernels() if request.param == "cpp" else CudaKernels()


def exact(case: Case) -> Case:
    """The same in fp64, with tensors of its own."""
    return {
        name: value.double().cpu()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value.cpu()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in case.items()
    }


def check(case: Case, reference: Case, state_dtype: torch.dtype, num_writes: int) -> None:
    index = case["state_indices"].cpu().long()
    error = error_ratio(case["ssm_state"].cpu()[index], reference["ssm_state"][index])
    assert error < num_writes**0.5 * UNIT[state_dtype] + ARITHMETIC
    assert error > UNIT[state_dtype] / 8, "the state was not kept in this dtype"
    out = error_ratio(case["out"].cpu(), reference["out"])
    assert out < 4 * num_writes**0.5 * UNIT[state_dtype] + 4 * ARITHMETIC


@pytest.mark.parametrize("state_dtype", UNIT, ids=str)
def test_decode(kernels: Kernels, state_dtype: torch.dtype, device: str) -> None:
    """The state is written once per token."""
    case = gdn_decode_case(3, HEADS, torch.float32, device, state_dtype=state_dtype)
    case["A_log"].fill_(-8.0)
    reference = exact(case)
    for _ in range(NUM_STEPS):
        for name in ("qkv", "a", "b"):
            case[name].copy_(torch.randn(case[name].shape))
            reference[name].copy_(case[name])
        kernels.gdn_decode(GdnDecode(**case))
        NaiveKernels().gdn_decode(GdnDecode(**reference))
    check(case, reference, state_dtype, NUM_STEPS)


@pytest.mark.parametrize("state_dtype", UNIT, ids=str)
def test_prefill(kernels: Kernels, state_dtype: torch.dtype, device: str) -> None:
    """The state is written once per call, however many tokens it has."""
    case = gdn_case(
        [70], [True], HEADS, torch.float32, device, state_dtype=state_dtype, slow_decay=True
    )
    assert len(case["chunk_indices"]) == len(chunk_metadata([0, 70])[0])
    reference = exact(case)
    for _ in range(NUM_CHUNKS):
        for name in ("qkv", "a", "b"):
            case[name].copy_(torch.randn(case[name].shape))
            reference[name].copy_(case[name])
        kernels.gdn_prefill(GdnPrefill(**case))
        NaiveKernels().gdn_prefill(GdnPrefill(**reference))
    check(case, reference, state_dtype, NUM_CHUNKS)


@pytest.mark.parametrize("kernels", [NaiveKernels(), CudaKernels()], ids=["naive", "triton"])
def test_a_wider_convolution_state_changes_no_bit(kernels: Kernels, device: str) -> None:
    """It holds the layer's last inputs, which are of the activations' dtype."""
    case = conv_case([5, 1], [True, True], 40, torch.float16, device)
    wide = case | {"conv_state": case["conv_state"].float(), "out": torch.empty_like(case["out"])}
    for _ in range(2):
        kernels.causal_conv1d(**case)
        kernels.causal_conv1d(**wide)
        assert torch.equal(case["out"], wide["out"])
        index = case["state_indices"].long()
        assert torch.equal(case["conv_state"][index].float(), wide["conv_state"][index])
