# SPDX-License-Identifier: Apache-2.0
"""How many drafts steps verify: what was accepted against what the batch makes of it."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from tests.v1.core.sched.helpers import Driver, make_request, make_scheduler
from vllm.decisions import Decision, DecisionLog
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.draft_policy import DraftPolicy
from vllm.v1.request import Request

#: bytes of a target's weights, to compare a drafter's with
TARGET = 10**9
#: by its name, what a drafter reads of its own weights to make so many drafts, by the target's
DRAFTERS: dict[str, Callable[[int], float]] = {
    "free": lambda drafts: 0.0,
    "chained": lambda drafts: 0.15 * drafts,
    "block": lambda drafts: 0.3 * (drafts > 0),
}


@pytest.fixture
def log() -> Iterator[DecisionLog]:
    log = DecisionLog()
    with log.current():
        yield log


def requests(count: int) -> list[Request]:
    return [Request(str(i), [1, 2], SamplingParams(max_tokens=9)) for i in range(count)]


def policy_of(num_drafts: int, drafter: str = "free") -> DraftPolicy:
    policy = DraftPolicy(num_drafts, clock=lambda: 0.0)
    reads = [round(TARGET * DRAFTERS[drafter](drafts)) for drafts in range(1 + num_drafts)]
    policy.use_weights_read(TARGET, reads)
    return policy


class Steps:
    """Steps of a batch whose drafts are accepted with probability `share` each. Results come two
    steps after the choice, as with asynchronous scheduling."""

    def __init__(self, policy: DraftPolicy, batch: Sequence[Request], seed: int = 0) -> None:
        self.policy, self.batch, self.share = policy, batch, 0.0
        self._random, self._in_flight = random.Random(seed), deque[int]()

    def run(self, count: int, share: float) -> list[int]:
        """The choices of so many steps."""
        self.share, chosen = share, []
        for _ in range(count):
            chosen.append(self.policy.choose(self.batch))
            self._in_flight.append(chosen[-1])
            if len(self._in_flight) > 2 and (drafts := self._in_flight.popleft()):
                for request in self.batch:
                    self.policy.observe(request, drafts, self._accepted(drafts))
        return chosen

    def _accepted(self, drafts: int) -> int:
        return next((i for i in range(drafts) if self._random.random() >= self.share), drafts)


def tokens(drafts: int, share: float) -> float:
    """That a step outputs per request in the mean: its accepted drafts and the one after them."""
    return sum(share**i for i in range(1 + drafts))


def time_of(drafts: int, count: int, drafter: str) -> float:
    """Of a step: reading the target's weights, 128 tokens in the same time, and drafting."""
    return 1 + count * (1 + drafts) / 128 + DRAFTERS[drafter](drafts)


def worth(count: int, share: float, drafter: str, ladder: Sequence[int]) -> dict[int, float]:
    """Output per time, by that without drafts."""
    plain = time_of(0, count, drafter)
    return {k: tokens(k, share) * plain / time_of(k, count, drafter) for k in ladder}


# ---- where it settles ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [3, 7])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("count", [1, 8, 64, 256])
def test_it_settles_on_the_best_width(
    count: int, share: float, drafter: str, num_drafts: int
) -> None:
    policy = policy_of(num_drafts, drafter)
    steps = Steps(policy, requests(count))
    steps.run(800, share)
    chosen = steps.run(1200, share)
    found = worth(count, share, drafter, policy.ladder)
    best = max(found, key=found.__getitem__)
    usual, often = Counter(chosen).most_common(1)[0]
    others = max(value for k, value in found.items() if k != best)
    if found[best] > 1.15 * others:
        assert usual == best and often > 0.8 * len(chosen)
    # Two that are worth the same within the margin and the noise are as good as each other.
    assert found[usual] > 0.93 * found[best]
    output = sum(tokens(k, share) for k in chosen)
    took = sum(time_of(k, count, drafter) for k in chosen) / time_of(0, count, drafter)
    assert output / took > 0.93 * found[best]


@pytest.mark.parametrize(
    ("count", "before", "after"), [(1, 0.05, 0.8), (8, 0.3, 0.9), (64, 0.9, 0.3)]
)
@pytest.mark.parametrize("drafter", ["free", "chained"])
def test_it_adapts_when_acceptance_changes(
    count: int, before: float, after: float, drafter: str
) -> None:
    policy = policy_of(7, drafter)
    steps = Steps(policy, requests(count))
    for share in (before, after, before):
        steps.run(1500, share)
        found = worth(count, share, drafter, policy.ladder)
        chosen = Counter(steps.run(200, share)).most_common(1)[0][0]
        assert found[chosen] > 0.95 * max(found.values()), share


def test_a_better_text_is_noticed_within_a_few_trials() -> None:
    """Of many requests that draft nothing."""
    policy = policy_of(3)
    steps = Steps(policy, requests(64))
    steps.run(300, 0.05)
    assert set(steps.run(100, 0.05)) <= {0, 1, 3} and policy.choose(steps.batch) == 0
    chosen = steps.run(800, 0.9)
    assert set(chosen[-100:]) == {3}


@pytest.mark.parametrize("count", [1, 8, 64, 256])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_trials_cost_one_percent_of_the_time(count: int, share: float, drafter: str) -> None:
    """What steps of more drafts than seem best take longer than those of the best."""

    class Noted(DraftPolicy):
        added = total = 0.0

        def choose(self, decodes: Sequence[Request]) -> int:
            drafts = super().choose(decodes)
            took, best = (time_of(k, count, drafter) for k in (drafts, self._best))
            self.added, self.total = self.added + took - best, self.total + took
            return drafts

    policy = Noted(7, clock=lambda: 0.0)
    policy.use_weights_read(TARGET, [round(TARGET * DRAFTERS[drafter](k)) for k in range(8)])
    Steps(policy, requests(count)).run(6000, share)
    assert 0 <= policy.added <= 0.01 * policy.total
    if share < 0.6 and count > 8:
        assert policy.added > 0, "nothing was tried"


def test_all_larger_numbers_are_tried() -> None:
    """Those that cost less more often, and each for four steps."""
    chosen = Steps(policy_of(7), requests(64)).run(12_000, 0.1)[600:11_990]
    trials = [(k, len(list(run))) for k, run in itertools.groupby(chosen) if k]
    assert {steps for _, steps in trials} == {4}
    counts = Counter(k for k, _ in trials)
    assert counts[1] > counts[3] > counts[7] > 1


def test_a_number_that_can_be_tried_at_any_time_leaves_room_for_others() -> None:
    """To one request drafts of `ngram` cost next to nothing."""
    chosen = Steps(policy_of(15), requests(1)).run(4000, 0.0)
    counts = Counter(chosen[600:])
    assert set(counts) == {0, 1, 3, 7, 15} and counts[1] < 3 * counts[3]


# ---- what it goes by -----------------------------------------------------------------------------


def seen(policy: DraftPolicy, batch: Sequence[Request], drafts: int, share: float) -> None:
    """Every request has verified so many drafts often, of which this share of the runs went on."""
    source = random.Random(1)
    for _ in range(600 // len(batch) + 60):
        for request in batch:
            accepted = next((i for i in range(drafts) if source.random() >= share), drafts)
            policy.observe(request, drafts, accepted)
        policy.choose(batch)


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
    policy, batch = policy_of(3), requests(count)
    seen(policy, batch, 3, share)
    assert Counter(policy.choose(batch) for _ in range(30)).most_common(1)[0][0] == drafts


def test_one_request_that_drafts_well_is_not_the_mean_of_the_batch() -> None:
    """Half of them always right and half never are worth other drafts than all half right."""
    mixed, alike = policy_of(7), policy_of(7)
    batches = requests(16), requests(16)
    source = random.Random(3)
    for _ in range(200):
        for i, (one, other) in enumerate(zip(*batches, strict=True)):
            mixed.observe(one, 7, 7 if i % 2 else 0)
            alike.observe(other, 7, next((k for k in range(7) if source.random() >= 0.5), 7))
        chosen = [
            policy.choose(batch) for policy, batch in zip((mixed, alike), batches, strict=True)
        ]
    assert chosen[0] == 7 and chosen[1] in (1, 3)


def test_what_drafting_costs_decides_with() -> None:
    """A head that is read for each draft stops earlier than a block that is read once."""
    found = {}
    for drafter in DRAFTERS:
        policy, batch = policy_of(7, drafter), requests(1)
        seen(policy, batch, 7, 0.65)
        found[drafter] = Counter(policy.choose(batch) for _ in range(30)).most_common(1)[0][0]
    assert found == {"free": 7, "chained": 3, "block": 7}


def test_a_drafter_that_reads_as_much_as_it_saves_is_not_tried() -> None:
    policy, batch = DraftPolicy(3), requests(1)
    policy.use_weights_read(TARGET, [0, TARGET, 2 * TARGET, 3 * TARGET])
    assert {policy.choose(batch) for _ in range(200)} == {0}


def test_a_tiny_target_is_no_measure_of_what_drafting_costs() -> None:
    policy = DraftPolicy(3)
    policy.use_weights_read(800_000, [0, 800_000, 1_600_000, 2_400_000])
    assert policy.slowdown(1, 3) == pytest.approx(1 + 3 / 129, abs=0.05)
    assert policy.choose(requests(1)) == 3


def test_a_new_request_is_expected_to_be_like_the_others() -> None:
    policy, (fresh,) = DraftPolicy(3), requests(1)
    assert policy.choose([fresh]) == 3
    for request in requests(400):
        policy.observe(request, 3, 0)
    assert policy.choose([fresh]) == 0


def test_the_same_decodes_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a request verifies drafts, one of them or another, like whom new ones may be."""
    policy, batch, (other,) = DraftPolicy(3), requests(4), requests(1)
    accepted, asked = policy._survival.accepted, list[Sequence[Request]]()

    def asking(decodes: Sequence[Request]) -> np.ndarray:
        asked.append(decodes)
        return accepted(decodes)

    monkeypatch.setattr(policy._survival, "accepted", asking)
    assert {policy.choose(batch) for _ in range(3)} == {3} and asked == [batch]
    policy.observe(other, 3, 0)
    policy.choose(batch)
    policy.choose(list(batch))
    assert len(asked) == 3


def test_a_step_without_decodes_changes_nothing() -> None:
    policy, batch = policy_of(3), requests(64)
    seen(policy, batch, 3, 0.6)
    assert policy.choose(batch) == policy.choose([]) == 1


def test_where_nothing_could_pay_nothing_is_tried() -> None:
    policy, batch = DraftPolicy(1), requests(4000)
    assert {policy.choose(batch) for _ in range(60)} == {0}


def test_a_number_is_kept_while_another_is_hardly_better() -> None:
    """At 0.9 per token three drafts and one are worth the same to 250 requests."""
    policy, batch = policy_of(3), requests(250)
    steps = Steps(policy, batch)
    steps.run(50, 0.9)
    chosen = steps.run(400, 0.9)
    assert len(list(itertools.groupby(chosen))) < 12


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
    policy, batch = DraftPolicy(3, clock=lambda: now[0]), requests(64)
    policy.choose(batch)
    assert (of_drafts(log).chosen, of_drafts(log).instead_of) == ("3", "1")
    assert "64 requests decode" in of_drafts(log).why
    assert "1.00 with 0, 1.50 with 1, 2.00 with 3" in of_drafts(log).why
    seen(policy, batch, 3, 0.6)
    assert of_drafts(log).chosen == "3", "it is recorded every ten seconds at most"
    now[0] = 20.0
    policy.choose(batch)
    assert (of_drafts(log).chosen, of_drafts(log).instead_of) == ("1", "3")
    now[0] = 40.0
    policy.choose(requests(6000))
    assert of_drafts(log).chosen == "0" and "too large" in of_drafts(log).why


def test_steps_are_counted_by_their_drafts() -> None:
    policy = policy_of(7)
    chosen = Steps(policy, requests(64)).run(500, 0.3)
    assert policy.take_counts() == Counter(chosen) and policy.take_counts() == {}


# ---- in a scheduler ------------------------------------------------------------------------------


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
