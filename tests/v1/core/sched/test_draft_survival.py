# SPDX-License-Identifier: Apache-2.0
"""How many drafts are expected to be accepted, from observations of steps of several widths."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.v1.core.sched.helpers import make_request
from vllm.v1.core.sched.draft_survival import DraftSurvival
from vllm.v1.request import Request

DRAFTS = 7


def requests(count: int) -> list[Request]:
    return [make_request(f"r{i}", [1, 2], max_tokens=9) for i in range(count)]


def fresh() -> Request:
    (request,) = requests(1)
    return request


def run_length(source: random.Random, shares: list[float]) -> int:
    """Drafts accepted until the first that is not, the i-th with the i-th share."""
    return next((i for i, share in enumerate(shares) if source.random() >= share), len(shares))


def expected(shares: list[float]) -> list[float]:
    """By number of drafts verified, how many are accepted in the mean."""
    return [float(np.cumprod(shares[:drafts]).sum()) for drafts in range(1 + len(shares))]


def of_others(survival: DraftSurvival) -> np.ndarray:
    """What a request that has verified nothing is expected to accept."""
    return survival.accepted([fresh()])


def test_before_anything_is_known_all_drafts_are_accepted() -> None:
    assert of_others(DraftSurvival(3)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "shares",
    [[0.6] * DRAFTS, [0.9, 0.8, 0.7, 0.5, 0.4, 0.3, 0.2], [0.3, *[0.9] * 6]],
)
def test_steps_of_any_widths_have_the_same_estimate(shares: list[float]) -> None:
    """The mean of what was accepted would depend on how many drafts steps had."""
    source, survival = random.Random(0), DraftSurvival(DRAFTS)
    for i in range(30_000):
        drafts = (1, 3, 7)[source.randrange(3)]
        accepted = min(drafts, run_length(source, shares))
        survival.observe(fresh(), drafts, accepted)
        if i % 10 == 0:
            found = of_others(survival)
    assert found == pytest.approx(expected(shares), rel=0.1)


def test_drafts_past_those_that_steps_verify_are_left_as_they_were() -> None:
    survival, others = DraftSurvival(3), requests(40)
    for request in others:
        survival.observe(request, 3, 1)
    before = np.diff(of_others(survival))
    assert before[1] < 0.05 * before[0]
    for request in requests(200):
        survival.observe(request, 1, 1)
    after = np.diff(of_others(survival))
    assert after[0] > 0.9 and after[1] / after[0] == pytest.approx(before[1] / before[0], rel=0.1)


def test_what_was_never_tried_is_like_the_draft_before() -> None:
    survival = DraftSurvival(3)
    for i, request in enumerate(requests(200)):
        survival.observe(request, 1, i % 2)
    one, two, three = np.diff(of_others(survival))
    assert one == pytest.approx(0.5, abs=0.01)
    assert (two, three) == pytest.approx((0.25, 0.125), abs=0.01)


def test_a_single_try_outweighs_the_draft_before() -> None:
    survival = DraftSurvival(2)
    for request in requests(200):
        survival.observe(request, 1, 1)
    for request in requests(4):
        survival.observe(request, 2, 1)
    assert np.diff(of_others(survival))[1] < 0.25


def test_old_observations_are_forgotten() -> None:
    source, survival = random.Random(1), DraftSurvival(3)
    for share in (0.9, 0.2):
        for i in range(8000):
            survival.observe(fresh(), 3, min(3, run_length(source, [share] * 3)))
            if i % 10 == 0:
                found = of_others(survival)
        assert found == pytest.approx(expected([share] * 3), rel=0.2)


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_a_request_differs_from_others_by_its_own_rejections(drafts: int) -> None:
    """However many drafts its steps verify; the others' part in it is the smaller one by then."""
    source, survival, (good, bad) = random.Random(2), DraftSurvival(DRAFTS), requests(2)
    for request in requests(200):
        for _ in range(3):
            survival.observe(request, DRAFTS, run_length(source, [0.6] * DRAFTS))
    of_others(survival)
    totals = np.zeros((2, 1 + DRAFTS))
    for step in range(600):
        for request, share in ((good, 0.85), (bad, 0.3)):
            survival.observe(request, drafts, min(drafts, run_length(source, [share] * DRAFTS)))
        both = np.array([survival.accepted([good]), survival.accepted([bad])])
        totals += both if step >= 100 else 0
        survival.observe(fresh(), DRAFTS, run_length(source, [0.6] * DRAFTS))
    own = totals / 500
    for mean, share in zip(own, (0.85, 0.3), strict=True):
        assert abs(mean[1] - share) < 0.6 * abs(0.6 - share)
    assert own[0, DRAFTS] > 2.5 * own[1, DRAFTS]


def test_requests_add_up() -> None:
    survival, batch = DraftSurvival(3), requests(5)
    for _ in range(9):
        for accepted, request in enumerate(batch[:4]):
            survival.observe(request, 3, accepted)
        survival.accepted(batch)
    each = [survival.accepted([request]) for request in batch]
    assert survival.accepted(batch) == pytest.approx(sum(each))
    assert each[0][3] < each[1][3] < each[2][3] < each[3][3]
