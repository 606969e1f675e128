# SPDX-License-Identifier: Apache-2.0
"""Whether steps verify drafts: what was accepted against what the batch makes of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.v1.core.sched.helpers import Driver, make_request, make_scheduler
from vllm.decisions import Decision, DecisionLog
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.draft_policy import DraftPolicy, step_cost
from vllm.v1.request import Request


@pytest.fixture
def log() -> Iterator[DecisionLog]:
    log = DecisionLog()
    with log.current():
        yield log


def requests(count: int, expected: float | None = None) -> list[Request]:
    found = [Request(str(i), [1, 2], SamplingParams(max_tokens=9)) for i in range(count)]
    for request in found:
        request.draft_yield = expected
    return found


@pytest.mark.parametrize(
    ("count", "accepted", "drafts"),
    [
        (1, 3.0, 3),
        (1, 0.1, 3),  # three more tokens cost next to nothing
        (1, 0.0, 0),
        (8, 0.5, 3),
        (8, 0.1, 0),
        (64, 1.95, 3),
        (64, 0.9, 0),
        (256, 1.95, 0),  # 0.8 per token: as fast without
    ],
)
def test_drafts_where_they_pay(count: int, accepted: float, drafts: int) -> None:
    assert DraftPolicy(3).choose(requests(count, accepted)) == drafts


def test_a_step_may_not_take_longer_than_its_tokens_are_worth() -> None:
    for count in (1, 4, 16, 64, 200):
        for accepted in (0.0, 0.4, 1.2, 2.5, 3.0):
            chosen = DraftPolicy(3).choose(requests(count, accepted))
            slower = step_cost(count * 4) / step_cost(count)
            assert (chosen == 3) == (1 + accepted > slower * 1.02)


#: bytes of one pass of the drafter by the target's: at which acceptance three drafts just pay
@pytest.mark.parametrize(
    ("count", "drafting", "needed"),
    [
        (1, 0.0, 0.044),
        (8, 0.0, 0.200),
        (1, 0.15, 0.196),
        (8, 0.15, 0.344),
        (64, 0.15, 1.142),
        (1, 0.6, 0.651),
    ],
)
def test_drafting_has_to_pay_for_itself(count: int, drafting: float, needed: float) -> None:
    policy = DraftPolicy(3)
    policy.use_weights_read(10**9, round(drafting * 10**9))
    assert policy.choose(requests(count, needed - 0.002)) == 0
    assert policy.choose(requests(count, needed + 0.002)) == 3


def test_a_drafter_that_reads_as_much_as_it_saves_is_not_tried() -> None:
    policy, batch = DraftPolicy(3), requests(1, 3.0)
    policy.use_weights_read(10**9, 3 * 10**9)
    assert {policy.choose(batch) for _ in range(200)} == {0}


def test_what_drafting_costs_is_a_decision(log: DecisionLog) -> None:
    DraftPolicy(3).use_weights_read(8 * 10**9, 12 * 10**8)
    (found,) = (d for d in log.decisions() if d.what == "cost of drafting")
    assert found.chosen == "0.150 of reading the target"
    assert "1200000000 bytes per step" in found.why


def test_a_tiny_target_is_no_measure_of_what_drafting_costs() -> None:
    policy = DraftPolicy(3)
    policy.use_weights_read(800_000, 2_400_000)
    assert policy.slowdown(1) == pytest.approx(1 + 3 / 129, abs=0.05)
    assert policy.choose(requests(1)) == 3


def test_a_new_request_is_expected_to_be_like_the_others() -> None:
    policy = DraftPolicy(3)
    (fresh,) = requests(1)
    assert policy.choose([fresh]) == 3
    for request in requests(200):
        policy.observe(request, 0)
    assert policy.choose([fresh]) == 0


def test_the_same_decodes_are_asked_once() -> None:
    """Until one of them verifies drafts, or another one, like whom new ones are expected to be."""

    class Counted(DraftPolicy):
        asked = 0

        def _yield_of(self, request: Request) -> float:
            self.asked += 1
            return super()._yield_of(request)

    policy, batch, (other,) = Counted(3), requests(4), requests(1)
    assert {policy.choose(batch) for _ in range(3)} == {3}
    assert policy.asked == 4
    policy.observe(other, 0)
    policy.choose(batch)
    policy.choose(list(batch))
    assert policy.asked == 4 + 1 + 4 + 4


def test_what_stops_paying_is_tried_again_now_and_then() -> None:
    policy, batch = DraftPolicy(3), requests(4, 3.0)
    chosen = []
    for _ in range(400):
        drafts = policy.choose(batch)
        chosen.append(drafts)
        for request in batch if drafts else ():
            policy.observe(request, 0)
    assert 0.02 < chosen[100:].count(3) / 300 < 0.15
    for _ in range(100):
        drafts = policy.choose(batch)
        for request in batch if drafts else ():
            policy.observe(request, 3)
    assert drafts == 3, "the text has become predictable"


def test_trials_cost_one_percent_of_the_time() -> None:
    policy, batch = DraftPolicy(3), requests(256, 0.5)
    chosen = [policy.choose(batch) for _ in range(4000)]
    slower = step_cost(256 * 4) / step_cost(256)
    assert 0 < chosen.count(3) * (slower - 1) / len(chosen) <= 0.01


def test_where_nothing_could_pay_nothing_is_tried() -> None:
    policy, batch = DraftPolicy(1), requests(4000, 1.0)
    assert {policy.choose(batch) for _ in range(60)} == {0}


@pytest.mark.parametrize(("accepted", "drafts"), [(3.0, 3), (0.0, 0)])
def test_requests_with_a_grammar_gain_as_others_do(accepted: float, drafts: int) -> None:
    batch = requests(4, accepted)
    for request in batch:
        request.grammar = object()  # type: ignore[assignment]
    assert DraftPolicy(3).choose(batch) == drafts


def of_drafts(log: DecisionLog) -> Decision:
    (found,) = (d for d in log.decisions() if d.what == "drafts per request")
    return found


def test_the_choice_is_a_decision(log: DecisionLog) -> None:
    now = [0.0]
    policy = DraftPolicy(3, clock=lambda: now[0])
    policy.choose(requests(2, 3.0))
    policy.choose(requests(2, 0.0))
    assert of_drafts(log).chosen == "3"
    now[0] = 20.0
    policy.choose(requests(2, 0.0))
    assert of_drafts(log).chosen == "0" and of_drafts(log).instead_of == "3"


def test_steps_change_their_width() -> None:
    """The fake model accepts by the toss of a coin; without blocks for it nothing goes wrong."""
    driver = Driver(make_scheduler(num_drafts=3))
    choices = iter([3, 3, 0, 0, 3, 0, 3] * 20)
    driver.scheduler.draft_policy.choose = lambda _: next(choices)  # type: ignore[method-assign]
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
    driver.scheduler.draft_policy.choose = lambda _: next(choices)  # type: ignore[method-assign]
    free, bound = (make_request(name, [5] * 3, max_tokens=40, ignore_eos=True) for name in "ab")
    bound.grammar = AnyText()  # type: ignore[assignment]
    driver.add(free, bound)
    driver.run()
    assert [len(driver.tokens[name]) for name in "ab"] == [40, 40]
    steps = driver.worker.steps[1:]
    both = [step.num_scheduled_tokens for step in steps if len(step.num_scheduled_tokens) == 2]
    assert {(1, 1), (4, 4)} <= {(widths["a"], widths["b"]) for widths in both}
