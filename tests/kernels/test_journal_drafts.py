# SPDX-License-Identifier: Apache-2.0
"""Drafts verified over a journal: the very bits of decoding the accepted tokens one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.journals import SMALL, Verifier, two_layers, verified
from tests.nightly import nightly
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels

pytestmark = pytest.mark.slow


@pytest.fixture(params=["naive", "triton", "cpu"])
def any_kernels(request, device) -> Kernels:
    if request.param == "cpu" and device != "cpu":
        pytest.skip("C++ kernels read host memory")
    return {"naive": NaiveKernels, "triton": CudaKernels, "cpu": CpuKernels}[request.param]()


def rounding(kernels: Kernels) -> float:
    """Torch adds up several tokens in another order than one; the other kernels never do."""
    return 1e-6 if isinstance(kernels, NaiveKernels) else 0.0


@pytest.mark.parametrize("width", [4, *nightly(2, 8)])
def test_rejected_drafts_leave_nothing(any_kernels, width, device):
    layers = two_layers(2, SMALL, torch.float32, device)
    assert verified(any_kernels, layers, SMALL, width, 6, seed=width) <= rounding(any_kernels)


def test_drafts_over_a_rounded_state(any_kernels, device):
    layers = two_layers(2, (1, 2, 16, 6), torch.float32, device, state_dtype=torch.float16)
    found = verified(any_kernels, layers, (1, 2, 16, 6), 3, 6)
    assert found <= max(rounding(any_kernels), 2e-3 * isinstance(any_kernels, NaiveKernels))


@pytest.mark.parametrize("name", ["pending", "taken", "first"])
def test_a_wrong_count_is_noticed(name, monkeypatch):
    """The comparison sees one token too many or too few in the state or the convolution."""
    step = Verifier.step

    def shifted(self: Verifier, *args: Any) -> Any:
        found = step(self, *args)
        counts = getattr(self.stack, name)
        counts[0] = max(int(counts[0]) - 1, 0) if counts[0] else 1
        return found

    monkeypatch.setattr(Verifier, "step", shifted)
    layers = two_layers(2, SMALL, torch.float32, "cpu")
    assert not verified(NaiveKernels(), layers, SMALL, 4, steps=6) <= 1e-3
