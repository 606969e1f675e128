# SPDX-License-Identifier: Apache-2.0
"""The experts' products in CUDA C++ against the reference: sizes, routings, graphs, other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import error_ratio
from tests.kernels.test_fp8_experts import FORMATS, SUMMED_BY_TENSOR_CORES, problem_of
from tests.kernels.test_moe import experts_problem
from vllm._extension import CUDA_LIBRARY
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER
from vllm.kernels.moe import ExpertsProblem, Routing, hopper, naive
from vllm.kernels.moe.blocks import most_blocks
from vllm.kernels.moe.hopper import (
    FEW,
    MANY,
    MOST_EXPERTS,
    OPS,
    SOME,
    run_experts,
    sort_into_blocks,
    takes_experts,
)

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: experts, hidden and intermediate size
LARGE = (257, 2048, 512)  # Qwen3.5-35B-A3B with its shared expert
SIZES = [LARGE, (128, 2048, 768), (8, 4096, 1792), (13, 320, 192), (5, 64, 64)]


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the kernel holds machine code of compute capability 9.0")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    assert OPS.choose(HOPPER)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def of_height(monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    monkeypatch.setattr(hopper, "block_height", lambda pairs, experts, scaled: height)


@pytest.mark.parametrize("height", [FEW, MANY])
@pytest.mark.parametrize(
    ("tokens", "slots", "experts"),
    [(2, 2, 3), (40, 3, 17), (256, 9, 257), (700, 8, MOST_EXPERTS), (3000, 3, 5), (9000, 9, 257)],
)
def test_blocks_hold_every_pair_once_in_order(
    tokens: int, slots: int, experts: int, height: int
) -> None:
    chosen = torch.randint(-1, experts + 1, (tokens, slots + 1), dtype=torch.int32)
    chosen[tokens // 2 :, 0] = experts - 1
    view = chosen.cuda()[:, :slots]
    blocks = sort_into_blocks(view, experts, height)
    assert blocks.count == len(blocks.experts) == most_blocks(tokens * slots, experts, height)
    flat, owners = chosen[:, :slots].flatten(), blocks.experts.tolist()
    pairs, ends = blocks.pairs.cpu(), blocks.ends.tolist()
    place = 0
    for expert in range(experts):
        own = torch.where(flat == expert)[0].int()
        assert ends[expert] == place + len(own)
        assert torch.equal(pairs[place : place + len(own)], own)
        used = -(-len(own) // height)
        assert owners[place // height : place // height + used] == [expert] * used
        place += used * height
    assert owners[place // height :] == [-1] * (blocks.count - place // height)


@pytest.mark.parametrize("height", [FEW, SOME, MANY])
@pytest.mark.parametrize("tokens", [2, 16, 100, 700, 3000])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], tokens: int, height: int
) -> None:
    of_height(monkeypatch, height)
    problem = experts_problem(tokens, "cuda", BF16, sizes=sizes, slots=3)
    assert takes_experts(problem)
    expected = naive.run_experts(problem)
    assert error_ratio(run_experts.run(problem), expected.double()) < 5e-3


def test_more_tiles_than_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 570 blocks of 16 tiles each: 68 for a multiprocessor, which knows 32 at a time."""
    of_height(monkeypatch, FEW)
    problem = experts_problem(12_000, "cuda", BF16, sizes=(5, 2048, 64), slots=3)
    expected = naive.run_experts(problem)
    assert error_ratio(run_experts.run(problem), expected.double()) < 5e-3


@pytest.mark.parametrize("height", [FEW, SOME])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("tokens", "sizes"), [(64, LARGE), (2500, LARGE), (300, (6, 256, 384))])
def test_float8_products_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    tokens: int,
    form: str,
    height: int,
) -> None:
    of_height(monkeypatch, height)
    problem = problem_of(tokens, form, "cuda", BF16, sizes=sizes, slots=3)
    assert takes_experts(problem) == (form == "groups" or height > FEW)
    expected = naive.run_experts(problem)
    assert error_ratio(run_experts.run(problem), expected.double()) < SUMMED_BY_TENSOR_CORES


def test_all_tokens_with_one_expert() -> None:
    problem = experts_problem(1000, "cuda", BF16, sizes=(40, 256, 128), slots=1)
    problem.routing.experts.fill_(39)
    expected = naive.run_experts(problem)
    assert error_ratio(run_experts.run(problem), expected.double()) < 5e-3


def test_experts_that_are_not_here_add_nothing() -> None:
    problem = experts_problem(32, "cuda", BF16, sizes=(6, 128, 64))
    problem.routing.experts[0] = torch.tensor([-7, 6, 2**31 - 1], dtype=torch.int32)
    problem.routing.experts[1:9] = -1
    found = run_experts.run(problem)
    assert (found[:9] == 0).all()
    problem.routing.experts[:9] = 0
    assert error_ratio(found[9:], naive.run_experts(problem)[9:].double()) < 5e-3


def part_of(problem: ExpertsProblem, rows: slice) -> ExpertsProblem:
    routing = Routing(problem.routing.weights[rows], problem.routing.experts[rows])
    return replace(problem, x=problem.x[rows], routing=routing)


@pytest.mark.parametrize("form", [None, *FORMATS])
def test_a_row_does_not_depend_on_the_others(form: str | None) -> None:
    """Nor on how many there are, which chooses the blocks' height."""
    sizes = (12, 512, 256)
    if form is None:
        problem = experts_problem(900, "cuda", BF16, sizes=sizes)
    else:
        problem = problem_of(900, form, "cuda", BF16, sizes=sizes)
    full = run_experts.run(problem)
    for rows in (slice(0, 16), slice(200, 290), slice(17, 640)):
        assert torch.equal(run_experts.run(part_of(problem, rows)), full[rows])


@pytest.mark.parametrize("tokens", [64, 1100])
def test_a_graph_holds_for_any_routing(tokens: int) -> None:
    """Captured launches overlap; nothing in them may be read too early."""
    kernels = CudaKernels(HOPPER)
    problems = [
        experts_problem(tokens, "cuda", BF16, sizes=(20, 512, 256), slots=4) for _ in range(3)
    ]
    problems[2].routing.experts.fill_(7)
    first = problems[0]
    x, weights, experts = (
        torch.empty_like(tensor)
        for tensor in (first.x, first.routing.weights, first.routing.experts)
    )
    static = replace(first, x=x, routing=Routing(weights, experts))

    def fill(problem: ExpertsProblem) -> None:
        x.copy_(problem.x)
        weights.copy_(problem.routing.weights)
        experts.copy_(problem.routing.experts)

    def step() -> Tensor:
        # The second layer reads what the first one wrote.
        return kernels.run_experts(replace(static, x=kernels.run_experts(static)))

    fill(first)
    assert takes_experts(static)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for problem in problems * 3:
        fill(problem)
        graph.replay()
        assert torch.equal(out, step())
        middle = naive.run_experts(static)
        expected = naive.run_experts(replace(static, x=middle))
        assert error_ratio(out, expected.double()) < 1e-2
