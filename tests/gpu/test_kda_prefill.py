# SPDX-License-Identifier: Apache-2.0
"""Prefills of Kimi delta attention in CUDA C++: accuracy, decays of any strength, bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import error_ratio
from tests.kernels.test_kda import prefill, strengthen, wide
from vllm._extension import CUDA_LIBRARY
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.kda import hopper
from vllm.model_executor.layers.fla.ops.kda.chunk_factors import chunk_factors
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SIZE = (4, 128, 128)
RAGGED = [200, 64, 1, 130, 63, 256]
CARRIED = [True, False, True, False, True, True]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels need compute capability 9.0")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    assert hopper.OPS.choose((9, 0))
    torch.manual_seed(0)


def made(lengths: list[int], carried: list[bool], padding: int = 0) -> KdaPrefill:
    problem = prefill(lengths, carried, SIZE, "cuda", BF16, padding)
    assert hopper.takes_prefill(problem)
    return problem


def errors(problem: KdaPrefill) -> tuple[float, float]:
    exact = wide(problem)
    hopper.hopper_prefill(problem)
    NaiveKernels().kda_prefill(exact)
    tokens = int(problem.query_start_loc[-1])
    assert torch.equal(problem.state.isnan(), exact.state.isnan())
    assert torch.equal(problem.out.isnan(), exact.out.isnan())
    return (
        error_ratio(problem.out[:tokens], exact.out[:tokens]),
        error_ratio(problem.state, exact.state),
    )


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_ragged_batches(state_dtype: torch.dtype) -> None:
    problem = made(RAGGED, CARRIED, padding=1)
    assert max(errors(replace(problem, state=problem.state.to(state_dtype)))) < 7e-3


# About 10 and 40 per token: over eight tokens, what fp32 has an exponent for and what it has not.
@pytest.mark.parametrize("by", [6.0, 25.0])
def test_strong_decays(by: float) -> None:
    assert max(errors(strengthen(made(RAGGED, CARRIED), by))) < 7e-3


def test_slow_decays() -> None:
    problem = made([1500], [True])
    problem.gates.A_log.uniform_(-8, -7)
    assert max(errors(problem)) < 1e-2


def test_the_factors_are_those_of_triton() -> None:
    problem = made(RAGGED, CARRIED)
    ours, theirs = hopper.hopper_factors(problem), chunk_factors(problem)
    for name, found in vars(ours).items():
        assert error_ratio(found, vars(theirs)[name].double()) < 2e-3, name


def run(problem: KdaPrefill) -> tuple[Tensor, Tensor]:
    hopper.hopper_prefill(problem)
    index = problem.state_indices.tolist()
    return problem.out, problem.state[index]


def test_bits_depend_neither_on_the_batch_nor_on_where_a_prompt_is_cut_into_chunks() -> None:
    whole = made([300], [False])
    out, state = run(whole)
    batch = made([70, 192, 20], [True, False, True])
    first, second = slice(0, 192), slice(192, 300)
    inside = slice(70, 262)
    batch.qkv[inside] = whole.qkv[first]
    batch.gates.a[inside], batch.gates.b[inside] = whole.gates.a[first], whole.gates.b[first]
    batch.gates.A_log.copy_(whole.gates.A_log)
    batch.gates.dt_bias.copy_(whole.gates.dt_bias)
    head, states = run(batch)
    assert torch.equal(head[inside], out[first])
    rest = made([108], [True])
    rest.state[rest.state_indices.tolist()] = states[1:2]
    gates = replace(whole.gates, a=whole.gates.a[second], b=whole.gates.b[second])
    tail, final = run(replace(rest, qkv=whole.qkv[second], gates=gates))
    assert torch.equal(tail, out[second])
    assert torch.equal(final, state)


def test_what_it_does_not_take_is_an_error() -> None:
    problem = prefill([70], [False], SIZE, "cuda", torch.float16)
    with pytest.raises(RuntimeError, match="q must be bfloat16"):
        hopper.hopper_prefill(problem)
