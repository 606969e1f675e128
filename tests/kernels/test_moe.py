# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: routing against transformers, kernels against the fp64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV4Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.kernels.cases import TOLERANCE, error_ratio, randn, strided, widen
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.moe import ExpertsProblem, Routing, RoutingProblem, RoutingRule, naive
from vllm.kernels.moe.blocks import most_blocks, sort_into_blocks
from vllm.kernels.moe.triton import block_rows
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.triton.configs import shipped

pytestmark = pytest.mark.slow

RULES = {
    "softmax": RoutingRule(3),
    "plain": RoutingRule(1, renormalize=False),
    "scaled sigmoid": RoutingRule(4, "sigmoid", epsilon=1e-20, scale=2.446),
    "best groups": RoutingRule(3, num_groups=3, top_groups=2),
    "best pairs": RoutingRule(
        4, "sigmoid", epsilon=1e-20, num_groups=4, top_groups=2, group_score="top2", scale=2.5
    ),
    "softplus": RoutingRule(3, "sqrtsoftplus", epsilon=1e-20, scale=1.5),
}


@pytest.fixture(params=["naive", "triton", "cpu"])
def kernels(request: pytest.FixtureRequest, device: str) -> Kernels:
    if request.param == "cpu" and device != "cpu":
        pytest.skip("the CPU's kernels read host memory")
    made: dict[str, Any] = {"naive": NaiveKernels, "triton": CudaKernels, "cpu": CpuKernels}
    return made[request.param]()


def wide(problem: Any) -> Any:
    """With floating tensors in fp64."""
    fields = {name: widen(value) for name, value in vars(problem).items()}
    if isinstance(problem, ExpertsProblem):
        routing = problem.routing
        fields["routing"] = Routing(widen(routing.weights), routing.experts)
    return type(problem)(**fields)


# ---- routing -------------------------------------------------------------------------------------


def test_rules_are_those_of_transformers() -> None:
    x = torch.randn(9, 16)
    weight = torch.randn(12, 16)
    logits = x @ weight.t()

    def same(rule: RoutingRule, weights: Tensor, experts: Tensor, bias: Any = None) -> None:
        found = naive.route_experts(RoutingProblem(logits, 12, rule, bias))
        order, expected_order = found.experts.sort(1), experts.sort(1)
        assert torch.equal(order.values, expected_order.values.int())
        torch.testing.assert_close(
            found.weights.gather(1, order.indices),
            weights.gather(1, expected_order.indices),
            rtol=1e-5,
            atol=1e-6,
        )

    for renormalize in (False, True):
        config = Qwen3MoeConfig(
            hidden_size=16, num_experts=12, num_experts_per_tok=3, norm_topk_prob=renormalize
        )
        router: Any = Qwen3MoeTopKRouter(config)
        router.weight.data = weight
        same(RoutingRule(3, renormalize=renormalize), *router(x)[1:])
    router = MixtralTopKRouter(
        MixtralConfig(hidden_size=16, num_local_experts=12, num_experts_per_tok=2)
    )
    router.weight.data = weight
    same(RoutingRule(2), *router(x)[1:])
    config = DeepseekV3Config(
        hidden_size=16,
        moe_intermediate_size=8,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data = weight
    bias = torch.rand(12)
    router.e_score_correction_bias.copy_(bias)
    same(RULES["best pairs"], *router(x)[1:], bias)
    router = DeepseekV4TopKRouter(
        DeepseekV4Config(
            hidden_size=16, n_routed_experts=12, num_experts_per_tok=3, num_hidden_layers=1
        )
    )
    router.weight.data = weight
    router.e_score_correction_bias.copy_(bias)
    same(RULES["softplus"], *router(x)[1:], bias)


def routing_problem(
    rule: RoutingRule, tokens: int, device: str, dtype: torch.dtype = torch.float32, **fields: Any
) -> RoutingProblem:
    experts = 12
    logits = strided(randn(tokens, experts + 1, dtype=dtype, device=device, scale=2.0))
    return RoutingProblem(logits, experts, rule, **fields)


@pytest.mark.parametrize(("tokens", "shared"), [(5, None), (3, "added"), (2, "gated"), (0, None)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_routing_agrees_with_fp64(
    kernels: Kernels, rule: RoutingRule, shared: Any, tokens: int, device: str, dtype: torch.dtype
) -> None:
    bias = randn(12, dtype=torch.float32, device=device) if rule.scores != "softmax" else None
    problem = routing_problem(rule, tokens, device, dtype, shared=shared, bias=bias)
    found, expected = kernels.route_experts(problem), naive.route_experts(wide(problem))
    assert found.experts.dtype == torch.int32 and found.weights.dtype == torch.float32
    assert found.experts.shape == (tokens, problem.slots)
    assert torch.equal(found.experts, expected.experts)
    if tokens:
        assert error_ratio(found.weights, expected.weights) < 1e-5


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_chosen_experts_are_weighed_by_their_scores(
    kernels: Kernels, scale: float, device: str
) -> None:
    """In the given order, the same expert twice, too; scores so small that `1 + exp(x)` is 1."""
    chosen = torch.tensor([[3, 0, 11], [5, 5, 1]], dtype=torch.int32, device=device)
    problem = routing_problem(RULES["softplus"], 2, device, shared="added", chosen=chosen)
    problem = replace(problem, logits=problem.logits * scale)
    found, expected = kernels.route_experts(problem), naive.route_experts(wide(problem))
    assert torch.equal(found.experts[:, :3], chosen) and (found.experts[:, 3] == 12).all()
    assert error_ratio(found.weights, expected.weights) < 1e-5
    scores = torch.nn.functional.softplus(problem.logits.double()).sqrt().gather(1, chosen.long())
    by_hand = 1.5 * scores / scores.sum(1, keepdim=True)
    assert error_ratio(expected.weights[:, :3], by_hand) < 1e-6


def test_small_softplus_is_exact(kernels: Kernels, device: str) -> None:
    """Both experts' `1 + exp(x)` is 1 in fp32; their scores still differ by e."""
    logits = torch.tensor([[-40.0, -42.0, -44.0]], device=device)
    rule = RoutingRule(2, "sqrtsoftplus")
    found = kernels.route_experts(RoutingProblem(logits, 3, rule))
    assert found.experts.tolist() == [[0, 1]]
    assert float(found.weights[0, 0] / found.weights[0, 1]) == pytest.approx(2.718281828, rel=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_bits_of_a_token_do_not_depend_on_the_others(rule: RoutingRule) -> None:
    """Of a router without further columns, so that rows follow each other in memory."""
    problem = RoutingProblem(torch.randn(40, 12) * 2, 12, rule)
    whole = CpuKernels().route_experts(problem).weights
    for tokens in (slice(3, end) for end in range(4, 41)):
        part = replace(problem, logits=problem.logits[tokens].contiguous())
        assert torch.equal(CpuKernels().route_experts(part).weights, whole[tokens])


def test_equal_scores_go_to_the_first_experts(kernels: Kernels, device: str) -> None:
    problem = RoutingProblem(torch.zeros(2, 6, device=device), 6, RoutingRule(2))
    found = kernels.route_experts(problem)
    assert found.experts.tolist() == [[0, 1]] * 2
    assert found.weights.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_without_numbers_are_routed_somewhere(
    kernels: Kernels, rule: RoutingRule, device: str
) -> None:
    """What pads a batch may hold anything; experts must exist all the same."""
    problem = routing_problem(rule, 4, device)
    problem.logits[1] = torch.nan
    problem.logits[2] = torch.inf
    problem.logits[3] = -torch.inf
    found = kernels.route_experts(problem).experts
    assert ((found >= 0) & (found < 12)).all()
    expected = naive.route_experts(wide(problem)).experts
    assert torch.equal(found[0], expected[0])


def test_routed_slots_are_counted(kernels: Kernels, device: str) -> None:
    counts = torch.zeros(12, dtype=torch.int64, device=device)
    problem = routing_problem(RULES["softmax"], 9, device, shared="gated", counts=counts)
    found = kernels.route_experts(problem).experts[:, :-1]
    assert torch.equal(counts.cpu(), found.cpu().flatten().long().bincount(minlength=12))
    counts.zero_()
    slots = torch.arange(9, device=device) * 3
    slots[4:] = -1
    found = kernels.route_experts(replace(problem, cache_slots=slots)).experts[:4, :-1]
    assert torch.equal(counts.cpu(), found.cpu().flatten().long().bincount(minlength=12))


def test_rules_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="3 groups of experts of 2"):
        RoutingRule(1, num_groups=2, top_groups=3)
    for rule, experts in ((RoutingRule(9), 8), (RoutingRule(1, num_groups=3), 8)):
        with pytest.raises(ValueError, match="of 8 in"):
            rule.check(experts)
    RoutingRule(4, num_groups=4, top_groups=2).check(8)


# ---- sorting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "slots", "experts"),
    [(2, 2, 3), (40, 3, 17), (171, 3, 8), (700, 3, 20), (1400, 3, 9)],
)
def test_blocks_hold_every_pair_once(
    tokens: int, slots: int, experts: int, rows: int, device: str
) -> None:
    chosen = torch.randint(0, experts, (tokens, slots + 1), dtype=torch.int32)
    chosen[tokens // 2 :, 0] = experts - 1
    view = chosen.to(device)[:, :slots]
    blocks = sort_into_blocks(view, experts, rows)
    assert blocks.count == len(blocks.experts) == most_blocks(tokens * slots, experts, rows)
    flat = view.flatten().tolist()
    place = 0
    owners = blocks.experts.tolist()
    for expert in range(experts):
        pairs = [pair for pair, owner in enumerate(flat) if owner == expert]
        assert int(blocks.ends[expert]) == place + len(pairs)
        assert blocks.pairs[place : place + len(pairs)].tolist() == pairs
        used = -(-len(pairs) // rows)
        assert owners[place // rows : place // rows + used] == [expert] * used
        place += used * rows
    assert owners[place // rows :] == [-1] * (blocks.count - place // rows)


def test_pairs_of_no_expert_are_left_out(device: str) -> None:
    chosen = torch.tensor([[0, -1], [2**31 - 1, 2], [2, 3]], dtype=torch.int32, device=device)
    blocks = sort_into_blocks(chosen, 3, 16)
    assert blocks.ends.tolist() == [1, 16, 18]
    assert blocks.pairs[0].tolist() == 0 and blocks.pairs[16:18].tolist() == [3, 4]


def test_blocks_are_as_high_as_experts_are_busy() -> None:
    configs = shipped("NVIDIA H200")
    heights = [block_rows(tokens * 9, 257, configs) for tokens in (1, 8, 256, 512, 2048, 8192)]
    assert heights == [16, 16, 16, 32, 128, 128]
    for gpu in (None, "NVIDIA H200"):
        assert shipped(gpu).moe_gate_up.keys() == shipped(gpu).moe_down.keys()


@pytest.mark.parametrize("rows", [16, 128])
def test_no_routing_needs_more_blocks_than_there_are(rows: int) -> None:
    for pairs, experts in ((1, 4), (9, 257), (100, 3), (65, 64)):
        worst = 0
        for hit in range(1, min(pairs, experts) + 1):
            # One expert has all but one pair of each of the others.
            worst = max(worst, hit - 1 + -(-(pairs - hit + 1) // rows))
        assert worst <= most_blocks(pairs, experts, rows)


# ---- experts -------------------------------------------------------------------------------------


def experts_problem(
    tokens: int,
    device: str,
    dtype: torch.dtype,
    *,
    sizes: tuple[int, int, int] = (6, 24, 40),
    slots: int = 3,
    shared: bool = False,
    gated: bool = True,
) -> ExpertsProblem:
    experts, hidden, inner = sizes
    logits = randn(tokens, experts, dtype=torch.float32, device=device, scale=2.0)
    kind: Any = "added" if shared else None
    routing = naive.route_experts(RoutingProblem(logits, experts, RoutingRule(slots), shared=kind))
    return ExpertsProblem(
        strided(randn(tokens, hidden, dtype=dtype, device=device)),
        randn(experts, (1 + gated) * inner, hidden, dtype=dtype, device=device, scale=hidden**-0.5),
        randn(experts, hidden, inner, dtype=dtype, device=device, scale=inner**-0.5),
        routing,
        strided(randn(tokens, hidden, dtype=dtype, device=device)) if shared else None,
        gated,
    )


@pytest.mark.parametrize(("shared", "gated"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_experts_agree_with_fp64(
    kernels: Kernels, tokens: int, shared: bool, gated: bool, device: str, dtype: torch.dtype
) -> None:
    problem = experts_problem(tokens, device, dtype, shared=shared, gated=gated)
    found, expected = kernels.run_experts(problem), naive.run_experts(wide(problem))
    assert found.shape == expected.shape and found.dtype == dtype
    if tokens:
        # Products and activations are rounded on the way.
        assert error_ratio(found, expected) < 2 * TOLERANCE[dtype]


def test_more_pairs_than_one_program_sorts(kernels: Kernels, device: str) -> None:
    problem = experts_problem(180, device, torch.float32)
    assert error_ratio(kernels.run_experts(problem), naive.run_experts(wide(problem))) < 5e-6


def test_all_tokens_with_one_expert(kernels: Kernels, device: str) -> None:
    problem = experts_problem(70, device, torch.float32, slots=1)
    problem.routing.experts.fill_(4)
    assert error_ratio(kernels.run_experts(problem), naive.run_experts(wide(problem))) < 5e-6


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    """With the same number of tokens: another one takes other tiles."""
    problem = experts_problem(33, device, torch.float32)
    full = CudaKernels().run_experts(problem)
    others = experts_problem(33, device, torch.float32)
    others.x[5] = problem.x[5]
    others.routing.experts[5] = problem.routing.experts[5]
    others.routing.weights[5] = problem.routing.weights[5]
    mixed = replace(others, gate_up=problem.gate_up, down=problem.down)
    assert torch.equal(CudaKernels().run_experts(mixed)[5], full[5])


def test_rows_of_the_cpu_do_not_depend_on_the_batch() -> None:
    problem = experts_problem(90, "cpu", torch.float32)
    full = CpuKernels().run_experts(problem)
    routing = Routing(problem.routing.weights[:7], problem.routing.experts[:7])
    part = CpuKernels().run_experts(replace(problem, x=problem.x[:7], routing=routing))
    assert torch.equal(part, full[:7])


@pytest.mark.parametrize("tokens", [1, 4])
def test_experts_that_are_not_here_add_nothing(kernels: Kernels, tokens: int, device: str) -> None:
    """Whatever their numbers: no memory is touched."""
    problem = experts_problem(tokens, device, torch.float32)
    elsewhere = torch.tensor([-7, 6, 2**31 - 1], dtype=torch.int32)
    problem.routing.experts[0] = elsewhere
    found = kernels.run_experts(problem)
    assert (found[0] == 0).all()
    problem.routing.experts[0] = 0
    expected = naive.run_experts(wide(problem))
    if tokens > 1:
        assert error_ratio(found[1:], expected[1:]) < 5e-6


@pytest.mark.parametrize("tokens", [1, 37])
def test_parts_of_a_stack_add_up(kernels: Kernels, tokens: int, device: str) -> None:
    """As ranks have them that have whole experts, not equally many."""
    whole = experts_problem(tokens, device, torch.float32)
    expected = naive.run_experts(wide(whole))
    logits = randn(tokens, 6, dtype=torch.float32, device=device)
    total = torch.zeros_like(whole.x)
    for first, end in ((0, 1), (1, 4), (4, 6)):
        routing = RoutingProblem(logits, 6, RULES["softmax"])
        part = kernels.route_experts(replace(routing, first=first)).experts
        assert torch.equal(part, kernels.route_experts(routing).experts - first)
        own = Routing(whole.routing.weights, whole.routing.experts - first)
        stack = {"gate_up": whole.gate_up[first:end], "down": whole.down[first:end]}
        total += kernels.run_experts(replace(whole, routing=own, ranks=3, **stack))
    assert error_ratio(total, expected) < 5e-6


# ---- on a GPU ------------------------------------------------------------------------------------

#: experts, hidden and intermediate size of Qwen3.5-35B-A3B with its shared expert
LARGE = (257, 2048, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 64, 256, 600, 2048, 5000])
def test_large_experts(tokens: int) -> None:
    problem = experts_problem(tokens, "cuda", torch.bfloat16, sizes=LARGE, slots=9)
    found = CudaKernels().run_experts(problem)
    expected = naive.run_experts(problem)
    assert error_ratio(found, expected.double()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 600])
def test_large_experts_without_gate(tokens: int) -> None:
    """Of the sizes of Nemotron-3-Nano, whose intermediate size no tile divides."""
    sizes = (128, 2688, 1856)
    problem = experts_problem(tokens, "cuda", torch.bfloat16, sizes=sizes, slots=6, gated=False)
    found = CudaKernels().run_experts(problem)
    assert error_ratio(found, naive.run_experts(problem).double()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_a_graph_holds_for_any_routing(tokens: int) -> None:
    kernels = CudaKernels()
    problems = [
        (
            routing_problem(RULES["softmax"], tokens, "cuda", torch.bfloat16, shared="gated"),
            experts_problem(tokens, "cuda", torch.bfloat16, sizes=(13, 256, 128), slots=4),
        )
        for _ in range(3)
    ]
    logits, x = (torch.empty_like(t) for t in (problems[0][0].logits, problems[0][1].x))
    weights = problems[0][1]

    def step() -> Tensor:
        routing = kernels.route_experts(replace(problems[0][0], logits=logits))
        return kernels.run_experts(replace(weights, x=x, routing=routing))

    def fill(route: RoutingProblem, mix: ExpertsProblem) -> None:
        logits.copy_(route.logits)
        x.copy_(mix.x)

    fill(*problems[0])
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for one in problems:
        fill(*one)
        graph.replay()
        routing = naive.route_experts(replace(one[0], logits=logits))
        expected = naive.run_experts(replace(weights, x=x, routing=routing))
        assert error_ratio(out, expected.double()) < 5e-3
