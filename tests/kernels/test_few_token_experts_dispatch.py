# SPDX-License-Identifier: Apache-2.0
"""When the experts' products are those of the kernel for a few tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_hopper_experts_dispatch import BF16, EXPERTS, HIDDEN, INNER, float8, zeros
from tests.kernels.test_hopper_experts_dispatch import problem_of as problem_of_several
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER, CudaOps
from vllm.kernels.moe import ClampedSwiglu, ExpertsProblem, Routing, few_tokens
from vllm.kernels.moe.few_tokens import (
    MOST_FLOAT8_TOKENS,
    MOST_INPUT_BYTES,
    MOST_PAIRS,
    MOST_ROW_BYTES,
    MOST_TOKENS,
    takes_few_tokens,
)
from vllm.kernels.moe.slots import SlotOutputs, experts_of_slots
from vllm.kernels.residual_stream import ResidualStream


def problem_of(
    tokens: int = MOST_TOKENS, hidden: int = HIDDEN, inner: int = INNER, **fields: object
) -> ExpertsProblem:
    return problem_of_several(tokens, hidden, inner, **fields)


#: rows of 1,024 channels that shared memory holds
HELD = MOST_INPUT_BYTES // (2 * 1024)


def of_slots(slots: int, width: int = INNER) -> ExpertsProblem:
    """Of one token."""
    problem = problem_of(1, width, width)
    weights, experts = (zeros(1, slots, dtype=dtype) for dtype in (torch.float32, torch.int32))
    return replace(problem, routing=Routing(weights, experts))


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem_of(), id="as many tokens as there may be"),
        pytest.param(problem_of(1), id="one token"),
        pytest.param(problem_of(hidden=8, inner=200), id="of an odd number of words"),
        pytest.param(problem_of(hidden=4096, inner=4096), id="of the longest rows"),
        pytest.param(
            problem_of(x=zeros(MOST_TOKENS, 160)[:, 16:144]), id="slice of a wider tensor"
        ),
        pytest.param(problem_of(shared=zeros(MOST_TOKENS, HIDDEN)), id="another shared expert"),
        pytest.param(float8(problem_of(MOST_FLOAT8_TOKENS), groups=True), id="float8 by groups"),
        pytest.param(float8(problem_of(1), groups=False), id="float8 by rows"),
        pytest.param(
            float8(problem_of(1, hidden=8192, inner=8192), groups=True), id="long rows of float8"
        ),
        pytest.param(of_slots(HELD - 1, 1024), id="as much as shared memory holds"),
        pytest.param(of_slots(MOST_PAIRS), id="as many pairs as there may be"),
    ],
)
def test_taken(problem: ExpertsProblem) -> None:
    assert takes_few_tokens(problem)


def fp16_beside(problem: ExpertsProblem) -> ExpertsProblem:
    return replace(problem, x=problem.x.half())


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem_of(0), id="nothing"),
        pytest.param(problem_of(MOST_TOKENS + 1), id="more tokens"),
        pytest.param(problem_of(x=zeros(1, HIDDEN, dtype=torch.float16)), id="fp16"),
        pytest.param(
            problem_of(gated=False, gate_up=zeros(EXPERTS, INNER, HIDDEN)), id="without gate"
        ),
        pytest.param(problem_of(clamp=ClampedSwiglu(1.7, 7.0, 1.0)), id="clamped"),
        pytest.param(
            problem_of(gate_up_bias=zeros(EXPERTS, 2 * INNER), down_bias=zeros(EXPERTS, HIDDEN)),
            id="biases",
        ),
        pytest.param(
            float8(problem_of(hidden=136), groups=False), id="float8 rows that are not aligned"
        ),
        pytest.param(
            float8(problem_of(1, inner=MOST_ROW_BYTES + 16), groups=False), id="longer of float8"
        ),
        pytest.param(fp16_beside(float8(problem_of(), groups=True)), id="fp16 beside float8"),
        pytest.param(problem_of(hidden=132), id="rows that are not aligned"),
        pytest.param(problem_of(x=zeros(1, 160)[:, 4:132]), id="tokens that are not"),
        pytest.param(problem_of(hidden=MOST_ROW_BYTES // 2 + 8), id="longer rows"),
        pytest.param(problem_of(inner=MOST_ROW_BYTES // 2 + 8), id="longer rows of the second"),
        pytest.param(of_slots(HELD, 1024), id="more than shared memory holds"),
        pytest.param(of_slots(MOST_PAIRS + 1), id="more pairs"),
        pytest.param(
            float8(problem_of(MOST_FLOAT8_TOKENS + 1), groups=True), id="more tokens of float8"
        ),
        pytest.param(
            problem_of(down=zeros(EXPERTS, INNER, HIDDEN).transpose(1, 2)), id="transposed"
        ),
    ],
)
def test_not_taken(problem: ExpertsProblem) -> None:
    assert not takes_few_tokens(problem)


def test_few_tokens_go_here_and_more_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library holds the kernels; the slots are left to who reads the stream."""
    monkeypatch.setattr(CudaOps, "choose", lambda self, capability: True)
    made: list[int] = []

    def outputs(problem: ExpertsProblem) -> SlotOutputs:
        made.append(len(problem.x))
        return SlotOutputs(problem, zeros(problem.experts.numel(), HIDDEN))

    run_add = experts_of_slots(outputs, takes_few_tokens, few_tokens.OPS)[1]
    monkeypatch.setattr(few_tokens, "run_experts_add", run_add)
    residual = zeros(MOST_TOKENS, HIDDEN)
    stream = CudaKernels(HOPPER).run_experts_add(problem_of(), residual)
    assert isinstance(stream, ResidualStream) and isinstance(stream.branch, SlotOutputs)
    assert made == [MOST_TOKENS] and stream.residual is residual
    assert stream.branch.outputs.dtype == BF16
