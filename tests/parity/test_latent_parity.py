# SPDX-License-Identifier: Apache-2.0
"""Kimi-Linear's latents in an engine: drafts change nothing, and what is lost is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_scenarios import Run, compare, engine
from parity_checks import (
    MakeEngine,
    assert_equals_reference,
    generate,
    in_this_process,
    one_stage,
    prompts,
)
from tiny_models import tiny_model

from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.moe import RoutingProblem
from vllm.platforms import current_platform

pytestmark = pytest.mark.parity

FAMILY = "kimi_linear"


@one_stage
def test_drafts_change_nothing(make_engine: MakeEngine) -> None:
    """Four tokens of a request at a time, of which some are accepted, beside prompts in chunks."""
    settings: dict[str, Any] = {"family": FAMILY, "enable_prefix_caching": True}
    batch, lengths = prompts((3, 70, 20, 130)), [30, 24, 27, 12]
    plain = Run(engine(make_engine, 0, **settings))
    plain.generate(batch, lengths)
    drafted = Run(engine(make_engine, 3, **settings), plain.tokens())
    drafted.generate(batch, lengths)
    compare(drafted.outputs, plain.outputs)
    accepted, rejected = drafted.drafts()
    assert accepted > 20 and rejected > 20


def _lost(first: int, last: int) -> Callable[[LatentAttentionProblem], LatentAttentionProblem]:
    """Columns of every cached row are zero."""

    def change(problem: LatentAttentionProblem) -> LatentAttentionProblem:
        cache = problem.cache.clone()
        cache[..., first:last] = 0
        return replace(problem, cache=cache)

    return change


def _other_values(problem: LatentAttentionProblem) -> LatentAttentionProblem:
    """Each head has its neighbour's values."""
    kv_b = problem.kv_b.clone()
    kv_b[:, problem.nope :] = kv_b[:, problem.nope :].roll(1, 0)
    return replace(problem, kv_b=kv_b)


def _no_choice_bias(problem: RoutingProblem) -> RoutingProblem:
    # Zeros before the weights are there: kernels are found by running them.
    assert problem.bias is not None
    return replace(problem, bias=torch.zeros_like(problem.bias))


def _no_scale(problem: RoutingProblem) -> RoutingProblem:
    return replace(problem, rule=replace(problem.rule, scale=1.0))


@in_this_process
@pytest.mark.parametrize(
    ("op", "change"),
    [
        pytest.param("latent_attention", _lost(0, 32), id="latents"),
        pytest.param("latent_attention", _lost(32, 40), id="shared keys"),
        pytest.param("latent_attention", _other_values, id="heads"),
        pytest.param("latent_attention", lambda p: replace(p, scale=16**-0.5), id="scale"),
        pytest.param("route_experts", _no_choice_bias, id="correction bias"),
        pytest.param("route_experts", _no_scale, id="routed scale"),
    ],
)
def test_damage_is_noticed(
    op: str,
    change: Callable[[Any], Any],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = current_platform.kernels
    run = getattr(kernels, op)
    monkeypatch.setattr(kernels, op, lambda problem: run(change(problem)))
    llm = make_engine(FAMILY, max_num_batched_tokens=64)
    output = generate(llm, prompts((17,)), max_tokens=10)[0]
    with pytest.raises(AssertionError, match="prompt of 17 tokens"):
        assert_equals_reference(output, tiny_model(FAMILY), max_tokens=10)
