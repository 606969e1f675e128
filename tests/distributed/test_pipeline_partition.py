# SPDX-License-Identifier: Apache-2.0
"""Layers divided into stages."""

from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm import decisions
from vllm.distributed.pipeline_partition import choose_partition, partition_layers
from vllm.exceptions import VLLMValidationError

COST = st.integers(0, 20).map(float)


def stage_costs(
    costs: list[float], counts: tuple[int, ...] | list[int], first: float, last: float
) -> list[float]:
    stages, end = [], 0
    for count in counts:
        stages.append(sum(costs[end : end + count]))
        end += count
    stages[0] += first
    stages[-1] += last
    return stages


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.lists(COST, min_size=1, max_size=9), COST, COST)
def test_the_costliest_stage_is_as_cheap_as_can_be(
    data: st.DataObject, costs: list[float], first: float, last: float
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    counts = partition_layers(costs, num_stages, first, last)
    assert len(counts) == num_stages and sum(counts) == len(costs) and min(counts) >= 1
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    every = (
        [end - start for start, end in zip((0, *cut), (*cut, len(costs)), strict=True)]
        for cut in cuts
    )
    best = min(max(stage_costs(costs, one, first, last)) for one in every)
    assert max(stage_costs(costs, counts, first, last)) == best


def test_equal_layers_are_spread_evenly() -> None:
    assert partition_layers([1.0] * 8, 4) == [2, 2, 2, 2]
    assert sorted(partition_layers([1.0] * 10, 4)) == [2, 2, 3, 3]
    # What is beside the layers counts, too.
    assert partition_layers([1.0] * 8, 2, first=2.0, last=4.0) == [5, 3]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(VLLMValidationError, match="the model has 2 layers.*at most 2 stages"):
        partition_layers([1.0, 1.0], 3)


def test_the_choice_is_recorded_and_may_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    log = decisions.DecisionLog()
    with log.current():
        assert choose_partition([1 << 20] * 4, 2) == [2, 2]
        assert (found := chosen(log)).chosen == "2,2" and "2.0, 2.0 MiB" in found.why
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
        assert choose_partition([1 << 20] * 4, 2) == [1, 3]
        assert (found := chosen(log)).chosen == "1,3" and found.why == "VLLM_PP_LAYER_PARTITION"


def chosen(log: decisions.DecisionLog) -> decisions.Decision:
    return next(one for one in log.decisions() if one.what == "layers per pipeline stage")


@pytest.mark.parametrize("text", ["4", "2,1", "4,0", "1,1,2", "5,-1"])
def test_an_override_must_fit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", text)
    with pytest.raises(VLLMValidationError, match="2 stages at least one layer each, 4 together"):
        choose_partition([1.0] * 4, 2)
