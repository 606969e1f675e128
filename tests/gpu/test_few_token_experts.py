# SPDX-License-Identifier: Apache-2.0
"""The experts' products of a few tokens against the reference: sizes, routings, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import error_ratio
from tests.kernels.test_fp8_experts import FORMATS, SUMMED_BY_TENSOR_CORES
from tests.kernels.test_fp8_experts import problem_of as float8_problem
from tests.kernels.test_moe import experts_problem
from vllm._extension import CUDA_LIBRARY
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER
from vllm.kernels.moe import ExpertsProblem, Routing, RoutingProblem, RoutingRule, few_tokens, naive
from vllm.kernels.moe.few_tokens import OPS, run_experts, run_experts_add, takes_few_tokens
from vllm.kernels.residual_stream import Norm

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: experts, hidden and intermediate size: Qwen3.5-35B-A3B with its shared expert, Qwen3-30B-A3B,
#: rows of several passes, of less than one and of odd lengths, and the longest that are taken
SIZES = [
    (257, 2048, 512),
    (128, 2048, 768),
    (8, 4096, 1792),
    (13, 328, 200),
    (5, 8, 8),
    (3, 2888, 1064),
    (2, 512, 4096),
]
#: the same for float8, whose rows are longer and have other odd lengths
FLOAT8_SIZES = [
    (257, 2048, 512),
    (8, 4096, 1792),
    (13, 336, 208),
    (5, 16, 16),
    (3, 2896, 1072),
    (2, 512, 8192),
]


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the kernel holds machine code of compute capability 9.0")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    assert OPS.choose(HOPPER)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def slots_that_fit(sizes: tuple[int, int, int], tokens: int, item: int) -> int:
    """Up to 8, for what is multiplied by the down projection to fit in shared memory."""
    room = few_tokens.MOST_INPUT_BYTES - tokens * sizes[1] * item
    return min(sizes[0], 8, room // (tokens * sizes[2] * item))


@pytest.fixture
def _more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than are faster this way."""
    monkeypatch.setattr(few_tokens, "MOST_TOKENS", 12)
    monkeypatch.setattr(few_tokens, "MOST_FLOAT8_TOKENS", 12)


@pytest.mark.usefixtures("_more_tokens")
@pytest.mark.parametrize("tokens", [1, 2, 4, 11])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_those_of_the_reference(sizes: tuple[int, int, int], tokens: int) -> None:
    slots = slots_that_fit(sizes, tokens, 2)
    if not slots:
        pytest.skip("more than shared memory holds")
    problem = experts_problem(tokens, "cuda", BF16, sizes=sizes, slots=slots)
    assert takes_few_tokens(problem)
    expected = naive.run_experts(problem)
    assert error_ratio(run_experts.run(problem), expected.double()) < 5e-3


@pytest.mark.usefixtures("_more_tokens")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 11])
@pytest.mark.parametrize("sizes", FLOAT8_SIZES)
def test_float8_products_are_those_of_the_reference(
    sizes: tuple[int, int, int], tokens: int, form: str
) -> None:
    slots = slots_that_fit((sizes[0], sizes[1] + 512, sizes[2] + 512), tokens, 1)
    if not slots:
        pytest.skip("more than shared memory holds")
    problem = float8_problem(tokens, form, "cuda", BF16, sizes=sizes, slots=slots)
    assert takes_few_tokens(problem)
    expected = naive.run_experts(problem)
    assert error_ratio(run_experts.run(problem), expected.double()) < SUMMED_BY_TENSOR_CORES


@pytest.mark.parametrize("form", FORMATS)
def test_the_longest_rows_and_zeros_of_float8(form: str) -> None:
    """Some groups have nothing but zeros, in the end all."""
    problem = float8_problem(1, form, "cuda", BF16, sizes=(2, 8192, 512), slots=2)
    problem.x[:, 200:900] = 0
    assert takes_few_tokens(problem)
    expected = naive.run_experts(problem)
    assert error_ratio(run_experts.run(problem), expected.double()) < SUMMED_BY_TENSOR_CORES
    problem.x.zero_()
    assert (run_experts.run(problem) == 0).all()


def test_experts_that_are_not_here_add_nothing() -> None:
    problem = experts_problem(1, "cuda", BF16, sizes=(6, 128, 64), slots=4)
    problem.routing.experts[0, 1:] = torch.tensor([-7, 6, 2**31 - 1], dtype=torch.int32)
    assert takes_few_tokens(problem)
    expected = naive.run_experts(problem)
    assert error_ratio(run_experts.run(problem), expected.double()) < 5e-3
    problem.routing.experts.fill_(-1)
    assert (run_experts.run(problem) == 0).all()


def test_another_shared_expert_is_added() -> None:
    problem = experts_problem(1, "cuda", BF16, sizes=(6, 128, 64), shared=True)
    assert takes_few_tokens(problem) and problem.shared is not None
    expected = naive.run_experts(problem)
    assert error_ratio(run_experts.run(problem), expected.double()) < 5e-3
    residual = torch.randn(1, 128, device="cuda", dtype=BF16)
    total = run_experts_add.run(problem, residual).total
    assert error_ratio(total, (expected + residual).double()) < 5e-3


def make(form: str, tokens: int, sizes: tuple[int, int, int], slots: int = 3) -> ExpertsProblem:
    if form == "bfloat16":
        return experts_problem(tokens, "cuda", BF16, sizes=sizes, slots=slots)
    return float8_problem(tokens, form, "cuda", BF16, sizes=sizes, slots=slots)


def part_of(problem: ExpertsProblem, row: int) -> ExpertsProblem:
    rows = slice(row, row + 1)
    routing = Routing(problem.routing.weights[rows], problem.routing.experts[rows])
    return replace(problem, x=problem.x[rows], routing=routing)


@pytest.mark.parametrize("form", ["bfloat16", *FORMATS])
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    problem = make(form, 4, (12, 512, 256))
    problem.routing.experts[2] = problem.routing.experts[1]
    assert takes_few_tokens(problem)
    full = run_experts.run(problem)
    for row in range(4):
        assert torch.equal(run_experts.run(part_of(problem, row)), full[row : row + 1])


@pytest.mark.parametrize("form", ["bfloat16", *FORMATS])
def test_a_graph_holds_for_any_routing(form: str) -> None:
    """Captured launches overlap: weights of a layer are read as soon as its experts are chosen, and
    no sooner."""
    kernels, hidden, layers = CudaKernels(HOPPER), 512, 4
    routers = torch.randn(layers, 24, hidden, device="cuda", dtype=BF16)
    problems = [make(form, 1, (24, hidden, 256), 4) for _ in range(layers)]
    x = torch.empty(1, hidden, device="cuda", dtype=BF16)
    norm = Norm(torch.ones(hidden, device="cuda", dtype=BF16), 1e-6, one_plus=False)

    def step() -> tuple[Tensor, list[Tensor]]:
        hidden_states, residual, chosen = x, x, []
        for problem, router in zip(problems, routers, strict=True):
            logits = kernels.linear(hidden_states, router, None)
            routing = kernels.route_experts(RoutingProblem(logits, 24, RoutingRule(4)))
            one = replace(problem, x=hidden_states, routing=routing)
            assert takes_few_tokens(one)
            stream = kernels.run_experts_add(one, residual)
            hidden_states, residual = kernels.enter(stream, norm)
            chosen.append(routing.experts)
        return hidden_states, chosen

    x.normal_()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, chosen = step()
    seen = set()
    for _ in range(50):
        x.normal_()
        graph.replay()
        expected, routed = step()
        assert torch.equal(out, expected)
        assert all(map(torch.equal, chosen, routed))
        seen.add(tuple(routed[-1].flatten().tolist()))
    assert len(seen) > 20
