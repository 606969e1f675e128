# SPDX-License-Identifier: Apache-2.0
"""When the experts' products are those of `vllm_cuda`, and in blocks of which height."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vllm.kernels import fp8
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER, CudaOps
from vllm.kernels.moe import ClampedSwiglu, ExpertScales, ExpertsProblem, Routing, hopper
from vllm.kernels.moe.hopper import FEW, LEAST_TOKENS, MANY, SOME, block_height, takes_experts
from vllm.kernels.moe.slots import SlotOutputs
from vllm.kernels.residual_stream import ResidualStream

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INNER = 3, 128, 256


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def problem_of(
    tokens: int = LEAST_TOKENS, hidden: int = HIDDEN, inner: int = INNER, **fields: object
) -> ExpertsProblem:
    routing = Routing(zeros(tokens, 2, dtype=torch.float32), zeros(tokens, 2, dtype=torch.int32))
    values: dict[str, object] = {
        "x": zeros(tokens, hidden),
        "gate_up": zeros(EXPERTS, 2 * inner, hidden),
        "down": zeros(EXPERTS, hidden, inner),
        "routing": routing,
    }
    return ExpertsProblem(**(values | fields))  # type: ignore[arg-type]


def float8(problem: ExpertsProblem, groups: bool) -> ExpertsProblem:
    scales = []
    for weight in (problem.gate_up, problem.down):
        counts = (weight.shape[2] // fp8.GROUP,) if groups else ()
        scales.append(zeros(EXPERTS, *counts, weight.shape[1], dtype=torch.float32))
    return replace(
        problem,
        gate_up=problem.gate_up.to(fp8.FP8),
        down=problem.down.to(fp8.FP8),
        scales=ExpertScales(*scales),
    )


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem_of(), id="bfloat16"),
        pytest.param(problem_of(hidden=64, inner=192), id="of 64 channels"),
        pytest.param(problem_of(x=zeros(20, 160)[:, 16:144]), id="slice of a wider tensor"),
        pytest.param(problem_of(shared=zeros(16, HIDDEN)), id="another shared expert"),
        pytest.param(float8(problem_of(300), groups=False), id="many in float8 by rows"),
        pytest.param(float8(problem_of(), groups=True), id="float8 by groups"),
    ],
)
def test_taken(problem: ExpertsProblem) -> None:
    assert takes_experts(problem)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem_of(LEAST_TOKENS - 1), id="few tokens"),
        pytest.param(problem_of(x=zeros(16, HIDDEN, dtype=torch.float16)), id="fp16"),
        pytest.param(
            problem_of(gated=False, gate_up=zeros(EXPERTS, INNER, HIDDEN)), id="without gate"
        ),
        pytest.param(problem_of(clamp=ClampedSwiglu(1.7, 7.0, 1.0)), id="clamped"),
        pytest.param(
            problem_of(gate_up_bias=zeros(EXPERTS, 2 * INNER), down_bias=zeros(EXPERTS, HIDDEN)),
            id="biases",
        ),
        pytest.param(problem_of(hidden=96), id="hidden size of no whole stages"),
        pytest.param(problem_of(inner=96), id="intermediate size of no whole stages"),
        pytest.param(float8(problem_of(300, hidden=192), groups=False), id="float8 of 192"),
        pytest.param(float8(problem_of(), groups=False), id="few in float8 by rows"),
        pytest.param(problem_of(x=zeros(16, HIDDEN + 4)[:, :HIDDEN]), id="token stride"),
        pytest.param(problem_of(x=zeros(16, HIDDEN + 8)[:, 4 : 4 + HIDDEN]), id="token offset"),
        pytest.param(problem_of(x=zeros(16, 2 * HIDDEN)[:, ::2]), id="every other column"),
        pytest.param(
            problem_of(down=zeros(EXPERTS, HIDDEN, 2 * INNER)[..., :INNER]), id="strided weight"
        ),
        pytest.param(
            problem_of(
                gate_up=zeros(EXPERTS * 2 * INNER * HIDDEN + 4)[4:].view(EXPERTS, -1, HIDDEN)
            ),
            id="weight at 8 bytes",
        ),
    ],
)
def test_not_taken(problem: ExpertsProblem) -> None:
    assert not takes_experts(problem)


def test_blocks_are_high_where_experts_are_busy() -> None:
    def heights(slots: int, experts: int, scaled: bool, *tokens: int) -> list[int]:
        return [block_height(count * slots, experts, scaled) for count in tokens]

    tokens = (2, 256, 900, 1024, 4000, 8192)
    assert heights(9, 257, False, *tokens) == [FEW, FEW, FEW, SOME, SOME, MANY]
    assert heights(9, 257, True, *tokens) == [FEW, FEW, FEW, SOME, SOME, SOME]
    # Mixtral: 2 of 8
    assert heights(2, 8, False, 16, 128, 129, 641) == [FEW, FEW, SOME, MANY]


def test_hopper_prefers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(CudaOps, "choose", lambda ops, capability: ops is hopper.OPS)
    monkeypatch.setattr(hopper.torch.cuda, "is_current_stream_capturing", lambda: False)

    def run(problem: ExpertsProblem) -> Tensor:
        calls.append(len(problem.x))
        return problem.x

    def run_add(problem: ExpertsProblem, residual: Tensor) -> ResidualStream:
        return ResidualStream(residual, run(problem))

    monkeypatch.setattr(hopper, "run_experts", replace(hopper.run_experts, run=run))
    monkeypatch.setattr(hopper, "run_experts_add", replace(hopper.run_experts_add, run=run_add))
    kernels = CudaKernels(HOPPER)
    kernels.run_experts(problem_of(40))
    kernels.run_experts_add(problem_of(30), zeros(30, HIDDEN))
    assert calls == [40, 30]
    assert kernels.run_experts(problem_of(0)).shape == (0, HIDDEN)
    stream = kernels.run_experts_add(problem_of(0), zeros(0, HIDDEN))
    assert isinstance(stream.branch, SlotOutputs) and stream.total.shape == (0, HIDDEN)
    assert calls == [40, 30]
