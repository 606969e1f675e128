# SPDX-License-Identifier: Apache-2.0
"""How often more drafts are tried than seem best, and for how long."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest

from vllm.v1.core.sched.draft_trials import DraftTrials

TIMES = {0: 1.0, 3: 1.5, 7: 2.5}


def run(steps: int, worth: dict[int, float], count: int = 1, best: int = 0) -> list[int]:
    trials = DraftTrials((0, 3, 7))
    return [trials.next(count, best, TIMES, worth) for _ in range(steps)]


def lost(chosen: list[int], worth: dict[int, float]) -> float:
    """By what trials made less output than none of them, in the time of all steps."""
    time = sum(TIMES[k] for k in chosen)
    return sum(TIMES[k] * (1 - worth[k]) for k in chosen) / time


@pytest.mark.parametrize(
    "worth", [{0: 1.0, 3: 0.7, 7: 0.4}, {0: 1.0, 3: 0.9, 7: 0.45}, {0: 1.0, 3: 0.99, 7: 0.98}]
)
def test_they_lose_one_percent_of_the_time(worth: dict[int, float]) -> None:
    chosen = run(20_000, worth)
    assert {3, 7} < set(chosen)
    assert lost(chosen, worth) < 0.0101


def test_what_is_nearly_as_good_is_tried_more_often() -> None:
    near, far = (Counter(run(20_000, {0: 1.0, 3: worth, 7: 0.4})) for worth in (0.98, 0.7))
    assert near[3] > 3 * far[3]


@pytest.mark.parametrize(("count", "steps"), [(1, 4), (4, 4), (8, 2), (64, 1)])
def test_a_trial_is_long_enough_to_see_some_drafts(count: int, steps: int) -> None:
    chosen = run(5000, {0: 1.0, 3: 0.7, 7: 0.4}, count)
    lengths = [len(list(group)) for k, group in groupby(chosen) if k]
    assert set(lengths) == {steps}


def test_there_are_steps_between_two() -> None:
    chosen = run(5000, {0: 1.0, 3: 1.0, 7: 1.0})
    pauses = [len(list(group)) for k, group in groupby(chosen) if not k]
    assert min(pauses[1:]) == 32
    assert len({len(list(group)) for k, group in groupby(chosen) if k}) == 1


@pytest.mark.parametrize(
    ("best", "worth", "tried"),
    [
        (0, {0: 1.0}, set()),
        (0, {0: 1.0, 3: 0.8}, {3}),
        (3, {0: 1.0, 3: 1.2, 7: 1.1}, {7}),
        (7, {0: 1.0, 3: 1.2, 7: 1.3}, set()),
    ],
)
def test_larger_numbers_are_tried_that_could_pay(
    best: int, worth: dict[int, float], tried: set[int]
) -> None:
    assert set(run(5000, worth, best=best)) - {0} == tried


def test_a_trial_ends_when_more_drafts_become_the_best() -> None:
    trials, worth = DraftTrials((0, 3, 7)), {0: 1.0, 3: 0.8, 7: 0.8}
    while trials.next(1, 0, TIMES, worth) == 0:
        pass
    assert trials.next(1, 7, TIMES, {0: 1.0, 3: 1.0, 7: 1.2}) == 0
