# SPDX-License-Identifier: Apache-2.0
"""The tiny mixtures' greedy tests can fail: each part of a mixture, damaged, changes tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from parity_checks import MakeEngine, assert_equals_reference, generate, in_this_process, prompts
from tiny_models import tiny_model

from vllm.kernels.moe import ExpertsProblem, Routing, RoutingProblem
from vllm.model_executor.layers.moe import MixtureOfExperts
from vllm.platforms import current_platform

pytestmark = [pytest.mark.parity, in_this_process]

Damage = Callable[[Any, pytest.MonkeyPatch], None]
FAMILIES = ("mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe")
WITH_SHARED = ("qwen3_next", "qwen3_5_moe")


def _change_routing(change: Callable[[RoutingProblem, Routing], Routing]) -> Damage:
    def damage(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        route = kernels.route_experts
        monkeypatch.setattr(kernels, "route_experts", lambda p: change(p, route(p)))

    return damage


def _other_expert(problem: RoutingProblem, routing: Routing) -> Routing:
    """The least of the chosen is another one."""
    experts = routing.experts.clone()
    last = problem.rule.top_k - 1
    experts[:, last] = (experts[:, last] + 1) % problem.num_experts
    return Routing(routing.weights, experts)


def _equal_weights(problem: RoutingProblem, routing: Routing) -> Routing:
    weights = routing.weights.clone()
    weights[:, : problem.rule.top_k] = 1 / problem.rule.top_k
    return Routing(weights, routing.experts)


def _no_renormalisation(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    route = kernels.route_experts

    def routed(problem: RoutingProblem) -> Routing:
        other = not problem.rule.renormalize
        rule: Any = replace(problem.rule, renormalize=other)
        return route(replace(problem, rule=rule))

    monkeypatch.setattr(kernels, "route_experts", routed)


def _ungated_shared(problem: RoutingProblem, routing: Routing) -> Routing:
    weights = routing.weights.clone()
    weights[:, -1] = 1.0
    return Routing(weights, routing.experts)


def _no_shared(problem: RoutingProblem, routing: Routing) -> Routing:
    weights = routing.weights.clone()
    weights[:, -1] = 0.0
    return Routing(weights, routing.experts)


def _up_before_gate(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever kernel computes it."""
    make = MixtureOfExperts._problem

    def swapped(layer: MixtureOfExperts, *given: Any) -> ExpertsProblem:
        problem = make(layer, *given)
        return replace(problem, gate_up=problem.gate_up.roll(problem.intermediate, 1))

    monkeypatch.setattr(MixtureOfExperts, "_problem", swapped)


DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "another expert": (_change_routing(_other_expert), (*FAMILIES, "kimi_linear")),
    "equal weights": (_change_routing(_equal_weights), (*FAMILIES, "kimi_linear")),
    "other sum of weights": (_no_renormalisation, FAMILIES),
    "halves swapped": (_up_before_gate, FAMILIES),
    "shared expert without gate": (_change_routing(_ungated_shared), WITH_SHARED),
    "no shared expert": (_change_routing(_no_shared), WITH_SHARED),
}


@pytest.mark.parametrize(
    ("family", "damage"),
    [
        pytest.param(family, damage, id=f"{family}-{name}")
        for name, (damage, families) in DAMAGES.items()
        for family in families
    ],
)
def test_damage_is_noticed(
    family: str, damage: Damage, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(current_platform.kernels, monkeypatch)
    llm = make_engine(family, max_num_batched_tokens=64)
    output = generate(llm, prompts((33,)), max_tokens=24)[0]
    with pytest.raises(AssertionError, match="prompt of 33 tokens"):
        assert_equals_reference(output, tiny_model(family), max_tokens=24)
