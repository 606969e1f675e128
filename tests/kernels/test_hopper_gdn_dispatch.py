# SPDX-License-Identifier: Apache-2.0
"""When the gated delta rule runs in `vllm_cuda`, and when in Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.cases import gdn_case
from tests.kernels.test_triton_gdn_stages import as_problem
from vllm.kernels.cuda import CudaKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule import hopper, triton
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper import takes_factors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors, empty_factors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem, GdnPrefill

BF16 = torch.bfloat16


def problem(dk: int = 128, dtype: torch.dtype = BF16) -> ChunkedProblem:
    return as_problem(gdn_case([3], [False], (1, 2, dk, 16), dtype, "cpu"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: {}, id="as the layer calls it"),
        pytest.param(lambda p: dict(a=p.a.float(), b=p.b.float()), id="fp32 projections"),
        pytest.param(
            lambda p: dict(a=p.a.float(), A_log=None, dt_bias=None, l2norm=False), id="gates"
        ),
        pytest.param(lambda p: dict(q=p.q.contiguous(), k=p.k.contiguous()), id="dense"),
    ],
)
def test_what_the_kernel_takes(change: Callable[[ChunkedProblem], dict[str, Any]]) -> None:
    p = problem()
    assert takes_factors(replace(p, **change(p)))


def test_other_heads_and_dtypes_are_not_taken() -> None:
    assert not takes_factors(problem(dk=64))
    assert not takes_factors(problem(dk=256))
    assert not takes_factors(problem(dtype=torch.float16))
    assert not takes_factors(problem(dtype=torch.float32))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: dict(a=p.a.half()), id="fp16 projections"),
        pytest.param(lambda p: dict(b=p.b.t().contiguous().t()), id="gates of dense tokens"),
        pytest.param(lambda p: dict(A_log=p.A_log.bfloat16()), id="bf16 A_log"),
        pytest.param(lambda p: dict(dt_bias=p.dt_bias.repeat(2)[::2]), id="strided dt_bias"),
        pytest.param(
            lambda p: dict(k=torch.ones(3, 1, 129, dtype=BF16)[:, :, 1:]), id="odd token stride"
        ),
        pytest.param(
            lambda p: dict(q=torch.ones(3, 1, 136, dtype=BF16)[:, :, 4:132]), id="at 8 bytes"
        ),
        pytest.param(
            lambda p: dict(q=torch.ones(3, 1, 256, dtype=BF16)[:, :, ::2]), id="every other value"
        ),
    ],
)
def test_what_it_does_not_take(change: Callable[[ChunkedProblem], dict[str, Any]]) -> None:
    p = problem()
    assert takes_factors(p)
    assert not takes_factors(replace(p, **change(p)))


class Recorder:
    """A first stage that notes its problems; its factors are all ones."""

    def __init__(self) -> None:
        self.problems: list[ChunkedProblem] = []

    def __call__(self, p: ChunkedProblem) -> ChunkFactors:
        self.problems.append(p)
        factors = empty_factors(p)
        for x in (factors.T, factors.P, factors.rows):
            x.fill_(1.0)
        return factors


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Stands for the compiled stage, on a device that runs it."""
    recorder = Recorder()
    monkeypatch.setattr(hopper, "chunk_factors", recorder)
    monkeypatch.setattr(hopper, "gdn_prefill", replace(hopper.gdn_prefill, needs=None))
    return recorder


def test_prefill_takes_the_stage_where_it_can(recorder: Recorder) -> None:
    case = gdn_case([1], [False], (1, 1, 128, 16), BF16, "cpu")
    CudaKernels().gdn_prefill(GdnPrefill(**case))
    (taken,) = recorder.problems
    assert taken.k.data_ptr() == as_problem(case).k.data_ptr()


def test_prefill_leaves_other_problems_to_triton(recorder: Recorder) -> None:
    case = gdn_case([70], [False], (1, 1, 128, 16), torch.float16, "cpu")
    expected = torch.empty_like(case["out"])
    triton.gdn_prefill(GdnPrefill(**case | dict(out=expected)))
    CudaKernels().gdn_prefill(GdnPrefill(**case))
    assert torch.equal(case["out"], expected) and not recorder.problems
