# SPDX-License-Identifier: Apache-2.0
"""When the scan of the gated delta rule runs in CUDA C++, and when in Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import gdn_case, strided
from tests.kernels.test_triton_gdn_stages import as_problem
from vllm.model_executor.layers.fla.ops.gated_delta_rule import hopper
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper import takes_scan
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem, GdnPrefill

BF16 = torch.bfloat16


def problem(
    dk: int = 128,
    dv: int = 128,
    dtype: torch.dtype = BF16,
    state_dtype: torch.dtype = torch.float32,
    extra: int = 8,
) -> tuple[ChunkedProblem, Tensor]:
    case = gdn_case([70], [False], (1, 2, dk, dv), dtype, "cpu", state_dtype=state_dtype)
    return as_problem(case | dict(qkv=strided(case["qkv"], extra))), case["out"]


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_bfloat16_and_heads_of_128_are_taken(state_dtype: torch.dtype) -> None:
    assert takes_scan(*problem(state_dtype=state_dtype))


def test_others_are_not() -> None:
    assert not takes_scan(*problem(dk=64))
    assert not takes_scan(*problem(dv=64))
    assert not takes_scan(*problem(dtype=torch.float16))
    assert not takes_scan(*problem(dtype=torch.float32))
    assert not takes_scan(*problem(state_dtype=torch.float16))
    assert not takes_scan(*problem(extra=4))
    p, out = problem()
    assert not takes_scan(p, strided(out.flatten(1), 4).unflatten(1, out.shape[1:]))
    for name in "qkv":
        apart = strided(getattr(p, name).flatten(1), 4).unflatten(1, getattr(p, name).shape[1:])
        assert not takes_scan(replace(p, **{name: apart}), out)
    shifted = torch.empty(3 * 2 * 128 * 128 + 1)[1:].view(3, 2, 128, 128)
    assert not takes_scan(replace(p, ssm_state=shifted), out)


@pytest.mark.parametrize(("state_dtype", "taken"), [(torch.float32, True), (torch.float16, False)])
def test_one_of_the_two_runs(
    state_dtype: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = gdn_case([70], [False], (1, 2, 128, 128), BF16, "cpu", state_dtype=state_dtype)
    factors = ChunkFactors(*(torch.empty(0) for _ in range(3)))
    runs: list[str] = []
    monkeypatch.setattr(hopper, "chunk_factors", lambda p: factors)
    monkeypatch.setattr(hopper, "scan", lambda *args: runs.append("vllm_cuda"))
    monkeypatch.setattr(hopper, "inter_chunk", lambda *args: runs.append("Triton"))
    p = GdnPrefill(**case)
    assert hopper.takes_prefill(p)
    hopper.hopper_prefill(p)
    assert runs == ["vllm_cuda" if taken else "Triton"]
