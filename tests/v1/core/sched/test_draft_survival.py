# SPDX-License-Identifier: Apache-2.0
"""How many drafts are expected to be accepted, from observations of steps of several widths."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.v1.core.sched.draft_process import expected
from vllm.v1.core.sched.draft_survival import DraftSurvival

DRAFTS = 7


def run_length(source: random.Random, shares: list[float]) -> int:
    """Drafts accepted until the first that is not, the i-th with the i-th share."""
    return next((i for i, share in enumerate(shares) if source.random() >= share), len(shares))


def seen(survival: DraftSurvival, times: int, drafts: int, accepted: int) -> np.ndarray:
    """The share of runs that get as far as each draft, after so many more observations."""
    for _ in range(times):
        survival.observe(drafts, accepted)
    return np.diff(survival.accepted())


def test_before_anything_is_known_most_drafts_are_accepted() -> None:
    assert DraftSurvival(3).accepted() == pytest.approx(expected([0.8] * 3))


@pytest.mark.parametrize(
    "shares",
    [[0.6] * DRAFTS, [0.9, 0.8, 0.7, 0.5, 0.4, 0.3, 0.2], [0.3, *[0.9] * 6]],
)
def test_steps_of_any_widths_have_the_same_estimate(shares: list[float]) -> None:
    """The mean of what was accepted would depend on how many drafts steps had."""
    source, survival = random.Random(0), DraftSurvival(DRAFTS)
    found = []
    for i in range(30_000):
        drafts = (1, 3, 7)[source.randrange(3)]
        survival.observe(drafts, min(drafts, run_length(source, shares)))
        if i % 10 == 0:
            found.append(survival.accepted())
    assert np.mean(found[500:], axis=0) == pytest.approx(expected(shares), rel=0.03)


def test_requests_that_are_unlike_have_their_mean() -> None:
    """Half of them always right and half never are worth other drafts than all half right."""
    survival = DraftSurvival(DRAFTS)
    for _ in range(400):
        for accepted in (0, DRAFTS):
            survival.observe(DRAFTS, accepted)
        found = survival.accepted()
    mean = np.mean([expected([share] * DRAFTS) for share in (0.0, 1.0)], axis=0)
    assert found == pytest.approx(mean, rel=0.05)
    assert found[DRAFTS] > 3 * expected([0.5] * DRAFTS)[DRAFTS]


def test_drafts_past_those_that_steps_verify_are_left_as_they_were() -> None:
    survival = DraftSurvival(3)
    before = seen(survival, 90, 3, 1)
    assert before[1] < 0.1 * before[0]
    after = seen(survival, 400, 1, 1)
    assert after[0] > 0.98 and after[1] / after[0] == pytest.approx(before[1] / before[0], rel=0.1)


def test_what_was_never_tried_is_like_the_draft_before() -> None:
    survival = DraftSurvival(3)
    for accepted in [0, 1] * 200:
        survival.observe(1, accepted)
        found = survival.accepted()
    one, two, three = np.diff(found)
    assert one == pytest.approx(0.5, abs=0.01)
    assert (two, three) == pytest.approx((0.25, 0.125), abs=0.01)


def test_a_few_tries_do_not_outweigh_the_draft_before() -> None:
    survival = DraftSurvival(2)
    seen(survival, 200, 1, 1)
    assert seen(survival, 2, 2, 1)[1] > 0.6
    assert seen(survival, 40, 2, 1)[1] < 0.15


def test_old_observations_are_forgotten() -> None:
    """Also of positions that are no longer reached: they are like those before, then."""
    survival = DraftSurvival(DRAFTS)
    seen(survival, 800, DRAFTS, DRAFTS)
    for _ in range(8):
        shares = seen(survival, 500, DRAFTS, 0)
    assert shares.sum() < 0.03


def test_many_observations_at_once_are_as_many_one_by_one() -> None:
    once, each = DraftSurvival(3), DraftSurvival(3)
    for i in range(16):
        for survival in (once, each):
            survival.observe(3, i % 4)
        each.accepted()
    assert once.accepted() == pytest.approx(each.accepted(), rel=0.02)
