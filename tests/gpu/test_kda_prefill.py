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
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SIZE = (4, 128, 128)
RAGGED = [200, 64, 1, 130, 63, 256]
CARRIED = [True, False, True, False, True, True]
#: heads for which the factors of six sequences are made by helpers, by blocks of threads that scan
#: half a head each, and by those of whole heads
WAYS = [4, 10, 16]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels need compute capability 9.0")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    assert hopper.OPS.choose((9, 0))
    torch.manual_seed(0)


def made(
    lengths: list[int], carried: list[bool], padding: int = 0, heads: int = SIZE[0]
) -> KdaPrefill:
    problem = prefill(lengths, carried, (heads, *SIZE[1:]), "cuda", BF16, padding)
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
@pytest.mark.parametrize("heads", WAYS)
def test_ragged_batches(heads: int, state_dtype: torch.dtype) -> None:
    problem = made(RAGGED, CARRIED, padding=1, heads=heads)
    assert max(errors(replace(problem, state=problem.state.to(state_dtype)))) < 7e-3


# About 10 and 40 per token: over eight tokens, what fp32 has an exponent for and what it has not.
@pytest.mark.parametrize("by", [6.0, 25.0])
@pytest.mark.parametrize("heads", WAYS)
def test_strong_decays(heads: int, by: float) -> None:
    assert max(errors(strengthen(made(RAGGED, CARRIED, heads=heads), by))) < 7e-3


def test_slow_decays() -> None:
    problem = made([1500], [True])
    problem.gates.A_log.uniform_(-8, -7)
    assert max(errors(problem)) < 1e-2


def run(problem: KdaPrefill) -> tuple[Tensor, Tensor]:
    hopper.hopper_prefill(problem)
    index = problem.state_indices.tolist()
    return problem.out, problem.state[index]


def test_heads_go_every_way() -> None:
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    pairs = [heads * len(RAGGED) for heads in WAYS]
    found = [hopper.helpers_of(made(RAGGED, CARRIED, heads=heads)) for heads in WAYS]
    assert found == [multiprocessors - 2 * pairs[0], 0, 0]
    assert 2 * pairs[1] <= multiprocessors < 2 * pairs[2]


# One sequence has helpers (4, 24 heads) or half a head a block of threads (50), three have helpers
# (4) or a head a block.
@pytest.mark.parametrize("heads", [4, 24, 50])
def test_bits_depend_neither_on_the_batch_nor_on_where_a_prompt_is_cut_into_chunks(
    heads: int,
) -> None:
    whole = made([300], [False], heads=heads)
    out, state = run(whole)
    batch = made([70, 192, 20], [True, False, True], heads=heads)
    first, second = slice(0, 192), slice(192, 300)
    inside = slice(70, 262)
    batch.qkv[inside] = whole.qkv[first]
    batch.gates.a[inside], batch.gates.b[inside] = whole.gates.a[first], whole.gates.b[first]
    batch.gates.A_log.copy_(whole.gates.A_log)
    batch.gates.dt_bias.copy_(whole.gates.dt_bias)
    head, states = run(batch)
    assert torch.equal(head[inside], out[first])
    rest = made([108], [True], heads=heads)
    rest.state[rest.state_indices.tolist()] = states[1:2]
    gates = replace(whole.gates, a=whole.gates.a[second], b=whole.gates.b[second])
    tail, final = run(replace(rest, qkv=whole.qkv[second], gates=gates))
    assert torch.equal(tail, out[second])
    assert torch.equal(final, state)


def test_what_it_does_not_take_is_an_error() -> None:
    problem = prefill([70], [False], SIZE, "cuda", torch.float16)
    with pytest.raises(RuntimeError, match="qkv must be bfloat16"):
        hopper.hopper_prefill(problem)
