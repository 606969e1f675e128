# SPDX-License-Identifier: Apache-2.0
"""How many drafts steps verify: what was accepted against what the batch makes of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.v1.core.sched.draft_process import (
    DRAFTERS,
    TARGET,
    Process,
    expected,
    flat,
    policy_of,
    time_of,
)
from tests.v1.core.sched.helpers import Driver, make_request, make_scheduler
from vllm.decisions import Decision, DecisionLog
from vllm.v1.core.sched.draft_policy import DraftPolicy


@pytest.fixture
def log() -> Iterator[DecisionLog]:
    log = DecisionLog()
    with log.current():
        yield log


def seen(policy: DraftPolicy, count: int, drafts: int, share: float) -> int:
    """What is chosen mostly after so many requests have verified so many drafts often, of which
    this share of the runs went on."""
    source = random.Random(1)
    for _ in range(1200):
        accepted = next((i for i in range(drafts) if source.random() >= share), drafts)
        policy.observe(drafts, accepted)
        policy.choose(count)
    return Counter(policy.choose(count) for _ in range(30)).most_common(1)[0][0]


# ---- what it goes by -----------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("count", [1, 8, 256])
def test_time_is_that_of_the_tokens_and_of_drafting(count: int, drafter: str) -> None:
    policy = policy_of(7, drafter)
    for drafts in range(8):
        slower = time_of(drafts, count, drafter) / time_of(0, count, drafter)
        assert policy.slowdown(count, drafts) == pytest.approx(slower)


@pytest.mark.parametrize(
    ("count", "share", "drafts"),
    [
        (1, 0.9, 3),
        (1, 0.3, 3),  # three more tokens cost next to nothing
        (1, 0.0, 0),
        (8, 0.3, 1),
        (8, 0.6, 3),
        (64, 0.9, 3),
        (64, 0.6, 1),
        (64, 0.2, 0),
        (256, 0.5, 0),
    ],
)
def test_as_many_drafts_as_pay(count: int, share: float, drafts: int) -> None:
    assert seen(policy_of(3), count, 3, share) == drafts


def test_what_drafting_costs_decides_with() -> None:
    """A head that is read for each draft stops earlier than a block that is read once."""
    found = {drafter: seen(policy_of(7, drafter), 1, 7, 0.65) for drafter in DRAFTERS}
    assert found == {"free": 7, "chained": 3, "block": 7, "head": 3}


def test_a_drafter_that_reads_as_much_as_it_saves_is_not_tried() -> None:
    policy = DraftPolicy(3)
    policy.use_weights_read(TARGET, [0, TARGET, 2 * TARGET, 3 * TARGET])
    assert {policy.choose(1) for _ in range(200)} == {0}


def test_a_tiny_target_is_no_measure_of_what_drafting_costs() -> None:
    policy = DraftPolicy(3)
    policy.use_weights_read(800_000, [0, 800_000, 1_600_000, 2_400_000])
    assert policy.slowdown(1, 3) == pytest.approx(1 + 3 / 129, abs=0.05)
    assert policy.choose(1) == 3


def test_a_step_without_decodes_changes_nothing() -> None:
    policy = policy_of(3)
    seen(policy, 64, 3, 0.6)
    before = policy.choose(64)
    policy.take_counts()
    assert policy.choose(0) == before and not policy.take_counts()


def test_where_nothing_could_pay_nothing_is_tried() -> None:
    policy = DraftPolicy(1)
    assert {policy.choose(100_000) for _ in range(60)} == {0}


def test_a_number_is_kept_while_another_is_hardly_better() -> None:
    """One draft of 128 requests has to be right half of the time to be worth as much as none: it is
    then changed seldom."""
    policy = policy_of(1)
    process = Process(policy, "free", 128)
    chosen = process.run(2000, flat(0.505, 1)).chosen
    changes = sum(a != b for a, b in zip(chosen, chosen[1:], strict=False))
    assert changes < 200


# ---- full width ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [1, 7])
def test_with_full_width_all_are_verified_whether_it_pays_or_not(
    num_drafts: int, log: DecisionLog
) -> None:
    policy = DraftPolicy(num_drafts, full_width=True)
    assert policy.ladder == (0, num_drafts)
    for _ in range(100):
        policy.observe(num_drafts, 0)
        assert policy.choose(256) == num_drafts
    assert policy.take_counts() == {num_drafts: 100}
    assert of_drafts(log).chosen == str(num_drafts) and "full_width is set" in of_drafts(log).why


@pytest.mark.parametrize("full_width", [False, True])
def test_the_setting_reaches_the_scheduler(full_width: bool) -> None:
    scheduler = make_scheduler(num_drafts=3, full_width=full_width)
    policy = scheduler.draft_policy
    for _ in range(300):
        policy.observe(3, 0)
    assert {policy.choose(64) for _ in range(5)} == {3 if full_width else 0}


# ---- what it says --------------------------------------------------------------------------------


def test_what_drafting_costs_is_a_decision(log: DecisionLog) -> None:
    DraftPolicy(3).use_weights_read(8 * 10**9, [0, 4 * 10**8, 8 * 10**8, 12 * 10**8])
    (found,) = (d for d in log.decisions() if d.what == "cost of drafting")
    assert found.chosen == "0.050 for 1, 0.150 for 3 of reading the target"
    assert "1200000000 bytes per step" in found.why


def of_drafts(log: DecisionLog) -> Decision:
    (found,) = (d for d in log.decisions() if d.what == "drafts per request")
    return found


def test_the_choice_is_a_decision(log: DecisionLog) -> None:
    now = [0.0]
    policy = DraftPolicy(3, clock=lambda: now[0])
    policy.choose(64)
    assert (of_drafts(log).chosen, of_drafts(log).instead_of) == ("3", "1")
    assert "64 requests decode" in of_drafts(log).why
    first, third = 1.8 / 4 * 3, (1 + expected([0.8] * 3)[3]) / 6 * 3
    assert f"1.00 with 0, {first:.2f} with 1, {third:.2f} with 3" in of_drafts(log).why
    seen(policy, 64, 3, 0.6)
    assert of_drafts(log).chosen == "3", "it is recorded every ten seconds at most"
    now[0] = 20.0
    policy.choose(64)
    assert (of_drafts(log).chosen, of_drafts(log).instead_of) == ("1", "3")
    now[0] = 40.0
    policy.choose(100_000)
    assert of_drafts(log).chosen == "0" and "too large" in of_drafts(log).why


def test_steps_are_counted_by_their_drafts() -> None:
    policy = policy_of(7)
    chosen = Process(policy, "free", 64).run(500, flat(0.3, 7)).chosen
    assert policy.take_counts() == Counter(chosen) and policy.take_counts() == {}


# ---- in a scheduler ------------------------------------------------------------------------------


def test_steps_change_their_width() -> None:
    """The fake model accepts by the toss of a coin; without blocks for it nothing goes wrong."""
    driver = Driver(make_scheduler(num_drafts=3))
    choices = iter([3, 3, 0, 0, 3, 0, 3] * 20)
    driver.scheduler.draft_policy.choose = lambda count: next(choices)  # type: ignore[method-assign]
    driver.add(make_request("a", [5] * 9, max_tokens=50, ignore_eos=True))
    driver.run()
    assert len(driver.tokens["a"]) == 50
    widths = [step.num_scheduled_tokens["a"] for step in driver.worker.steps[1:-1]]
    assert {1, 4} <= set(widths)
    allowed = [step.num_next_drafts for step in driver.worker.steps]
    assert all(width <= 1 + drafts for drafts, width in zip(allowed, widths, strict=False))


class AnyText:
    """A grammar that allows every token."""

    ready, terminated = True, False

    def compile_error(self) -> None:
        return None

    def accept(self, token_id: int) -> bool:
        return True


def test_requests_with_a_grammar_are_as_wide_as_others() -> None:
    driver = Driver(make_scheduler(num_drafts=3))
    choices = iter([0, 0, 3, 3, 0, 3] * 20)
    driver.scheduler.draft_policy.choose = lambda count: next(choices)  # type: ignore[method-assign]
    free, bound = (make_request(name, [5] * 3, max_tokens=40, ignore_eos=True) for name in "ab")
    bound.grammar = AnyText()  # type: ignore[assignment]
    driver.add(free, bound)
    driver.run()
    assert [len(driver.tokens[name]) for name in "ab"] == [40, 40]
    steps = driver.worker.steps[1:]
    both = [step.num_scheduled_tokens for step in steps if len(step.num_scheduled_tokens) == 2]
    assert {(1, 1), (4, 4)} <= {(widths["a"], widths["b"]) for widths in both}
