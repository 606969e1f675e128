# SPDX-License-Identifier: Apache-2.0
"""When the experts' products of a few tokens are made pair by pair."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_hopper_experts_dispatch import BF16, EXPERTS, HIDDEN, INNER, float8, zeros
from tests.kernels.test_hopper_experts_dispatch import problem_of as problem_of_several
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER, CudaOps
from vllm.kernels.moe import ClampedSwiglu, ExpertsProblem, pairwise
from vllm.kernels.moe.pairwise import MOST_GATED_BYTES, MOST_ROW_BYTES, MOST_TOKENS, takes_pairs
from vllm.kernels.moe.slots import SlotOutputs
from vllm.kernels.residual_stream import ResidualStream


def problem_of(
    tokens: int = MOST_TOKENS, hidden: int = HIDDEN, inner: int = INNER, **fields: object
) -> ExpertsProblem:
    return problem_of_several(tokens, hidden, inner, **fields)


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
    ],
)
def test_taken(problem: ExpertsProblem) -> None:
    assert takes_pairs(problem)


def of_many_slots(inner: int) -> ExpertsProblem:
    """As much between the products as shared memory holds, and one pair more."""
    problem = problem_of(1, inner=inner)
    slots = MOST_GATED_BYTES // (2 * inner) + 1
    routing = type(problem.routing)(
        zeros(1, slots, dtype=torch.float32), zeros(1, slots, dtype=torch.int32)
    )
    return problem_of(1, inner=inner, routing=routing)


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
        pytest.param(float8(problem_of(), groups=True), id="float8"),
        pytest.param(problem_of(hidden=132), id="rows that are not aligned"),
        pytest.param(problem_of(x=zeros(1, 160)[:, 4:132]), id="tokens that are not"),
        pytest.param(problem_of(hidden=MOST_ROW_BYTES // 2 + 8), id="longer rows"),
        pytest.param(problem_of(inner=MOST_ROW_BYTES // 2 + 8), id="longer rows of the second"),
        pytest.param(of_many_slots(1024), id="more between the products"),
        pytest.param(
            problem_of(down=zeros(EXPERTS, INNER, HIDDEN).transpose(1, 2)), id="transposed"
        ),
    ],
)
def test_not_taken(problem: ExpertsProblem) -> None:
    assert not takes_pairs(problem)


def test_few_tokens_go_here_and_more_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library holds the kernels; the slots are left to who reads the stream."""
    monkeypatch.setattr(CudaOps, "choose", lambda self, capability: True)
    kernels = CudaKernels(HOPPER)
    made: list[int] = []

    def outputs(problem: ExpertsProblem) -> SlotOutputs:
        made.append(len(problem.x))
        return SlotOutputs(problem, zeros(problem.experts.numel(), HIDDEN))

    monkeypatch.setattr(pairwise, "_slot_outputs", outputs)
    residual = zeros(MOST_TOKENS, HIDDEN)
    stream = kernels.run_experts_add(problem_of(), residual)
    assert isinstance(stream, ResidualStream) and isinstance(stream.branch, SlotOutputs)
    assert made == [MOST_TOKENS] and stream.residual is residual
    assert stream.branch.outputs.dtype == BF16
