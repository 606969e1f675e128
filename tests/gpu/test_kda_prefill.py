# SPDX-License-Identifier: Apache-2.0
"""Prefills of Kimi delta attention in CUDA C++: accuracy, decays of any strength, bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from tests.kernels.cases import error_ratio
from tests.kernels.test_kda import prefill, strengthen, wide
from vllm._extension import CUDA_LIBRARY
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.kda import hopper, hopper_fused, hopper_stages
from vllm.model_executor.layers.fla.ops.kda.chunk_factors import chunk_factors
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SIZE = (4, 128, 128)
RAGGED = [200, 64, 1, 130, 63, 256]
CARRIED = [True, False, True, False, True, True]
#: heads of a layer whose prefills are two launches, and one
STAGES, ONE_LAUNCH = 4, hopper.HEADS_OF_ONE_LAUNCH
#: How many sequences of the latter have factors that helpers make, blocks of threads that scan half
#: a head each, and those of whole heads.
WAYS = [1, 2, 6]


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


CASES = [(STAGES, 6), *((ONE_LAUNCH, count) for count in WAYS)]


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("heads", "sequences"), CASES)
def test_ragged_batches(heads: int, sequences: int, state_dtype: torch.dtype) -> None:
    problem = made(RAGGED[:sequences], CARRIED[:sequences], padding=1, heads=heads)
    assert max(errors(replace(problem, state=problem.state.to(state_dtype)))) < 7e-3


# About 2, 10 and 40 per token: chunks of 32 that are seen from their middle, and over eight tokens
# what fp32 has an exponent for and what it has not.
@pytest.mark.parametrize("by", [2.0, 6.0, 25.0])
@pytest.mark.parametrize(("heads", "sequences"), CASES)
def test_strong_decays(heads: int, sequences: int, by: float) -> None:
    problem = made(RAGGED[:sequences], CARRIED[:sequences], heads=heads)
    assert max(errors(strengthen(problem, by))) < 7e-3


@pytest.mark.parametrize("heads", [STAGES, ONE_LAUNCH])
def test_slow_decays(heads: int) -> None:
    problem = made([1500], [True], heads=heads)
    problem.gates.A_log.uniform_(-8, -7)
    assert max(errors(problem)) < 1e-2


def test_sequences_go_every_way() -> None:
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    pairs = [ONE_LAUNCH * count for count in WAYS]
    problems = [made(RAGGED[:n], CARRIED[:n], heads=ONE_LAUNCH) for n in WAYS]
    found = [hopper_fused.helpers_of(problem) for problem in problems]
    assert found == [multiprocessors - 2 * pairs[0], 0, 0]
    assert 2 * pairs[1] <= multiprocessors < 2 * pairs[2]


def exact_factors(p: KdaPrefill) -> dict[str, Tensor]:
    """The factors in fp64, chunk by chunk, from the formulas of `chunk_factors`."""
    heads, dk, _ = SIZE
    wider = wide(p)
    q, k, _ = wider.qkv.unflatten(1, (3 * heads, dk)).split(heads, dim=1)
    q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * dk**-0.5
    k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    gates, eye = wider.gates, torch.eye(64, device=q.device, dtype=q.dtype)
    g = -gates.A_log.exp()[:, None] * softplus(gates.a + gates.dt_bias)
    starts, made = p.query_start_loc.tolist(), []
    for seq, chunk in p.chunk_indices.tolist():
        first = starts[seq] + 64 * chunk
        length = min(64, starts[seq + 1] - first)
        rows = slice(first, first + length)

        def padded(x: Tensor, rows: slice = rows, length: int = length) -> Tensor:
            return pad(x[rows].movedim(0, -1), (0, 64 - length)).movedim(-1, 1)

        K, Q, G = padded(k), padded(q), padded(g).cumsum(1)
        beta = padded(gates.b.sigmoid())
        seen = (G[:, :, None] - G[:, None]).clamp(max=0.0).exp()
        A = torch.einsum("hic,hjc,hijc->hij", K, K, seen).tril(-1) * beta[:, None]
        made.append({
            "queries": Q * G.exp(),
            "keys": K * G.exp(),
            "ends": K * (G[:, -1:] - G).exp(),
            "T": beta[:, :, None] * torch.linalg.inv(eye + A),
            "P": torch.einsum("hic,hjc,hijc->hij", Q, K, seen).tril(),
            "decays": G[:, -1:].exp(),
        })  # fmt: skip
    return {name: torch.stack([x[name] for x in made]) for name in made[0]}


@pytest.mark.parametrize("by", [0.0, 6.0])
def test_the_factors_are_as_exact_as_those_of_triton(by: float) -> None:
    problem = made(RAGGED, CARRIED)
    if by > 0:
        strengthen(problem, by)
    ours, theirs = hopper_stages.hopper_factors(problem), chunk_factors(problem)
    for name, exact in exact_factors(problem).items():
        found, allowed = (error_ratio(vars(x)[name], exact) for x in (ours, theirs))
        assert found < 1.1 * allowed + 2e-5, name


def run(problem: KdaPrefill) -> tuple[Tensor, Tensor]:
    hopper.hopper_prefill(problem)
    index = problem.state_indices.tolist()
    return problem.out, problem.state[index]


# Two launches: the scan's blocks of threads have a head each or half of one, of 24 heads and three
# sequences 72, of one sequence 48. One launch: a sequence has helpers (32 heads) or half a head a
# block (50), three have a head a block.
@pytest.mark.parametrize("heads", [4, 24, 32, 50])
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
    for heads, name in ((STAGES, "q"), (ONE_LAUNCH, "qkv")):
        problem = prefill([70], [False], (heads, *SIZE[1:]), "cuda", torch.float16)
        with pytest.raises(RuntimeError, match=f"{name} must be bfloat16"):
            hopper.hopper_prefill(problem)
