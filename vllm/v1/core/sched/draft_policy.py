# SPDX-License-Identifier: Apache-2.0
"""How many drafts the next step verifies: measured acceptance against what the wider step costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from vllm import decisions
from vllm.config.draft_ladder import draft_ladder
from vllm.v1.core.sched.draft_survival import DraftSurvival
from vllm.v1.core.sched.draft_trials import DraftTrials

#: tokens whose computation takes a step as long as reading the weights does
BALANCE = 128
#: weights that take no time to read beside the rest of a step: tiny models' are fewer
LEAST_BYTES = 2**26
#: by what another number of drafts has to be better, in output per time
_MARGIN = 1.01
_SECONDS_BETWEEN_RECORDS = 10.0


def step_cost(num_tokens: int) -> float:
    """Time of a step of `num_tokens`, of which the first is nearly all: weights are read once."""
    return 1 + num_tokens / BALANCE


class DraftPolicy:
    """Chooses how many drafts per request the next step verifies, a number of `ladder`, for all
    decodes of the step: its kernels run one width, so a request with fewer would cost as much.

    A number is worth the tokens that a step is expected to output (`DraftSurvival`) by the time it
    takes: `step_cost` of its tokens, and what the drafter reads of its own weights to propose them
    (`use_weights_read`). The best one is chosen, but for trials of larger ones (`DraftTrials`); not
    of those that could not pay even if all drafts were accepted, the batch being so large. It is
    left for one that is better by `_MARGIN`, and for 0 as soon as it costs more than it gains: the
    first step of another width costs more than the others.

    With `full_width` each step verifies all drafts, whether that pays or not.
    """

    def __init__(
        self,
        num_drafts: int,
        full_width: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_drafts = num_drafts
        self.ladder = draft_ladder(num_drafts, full_width)
        self._full_width = full_width
        #: steps by the drafts they were allowed, since `take_counts`
        self._counts: Counter[int] = Counter()
        self._clock = clock
        #: what drafting takes, by number of drafts, in units of reading the target's weights once
        self._drafting = [0.0] * (1 + num_drafts)
        self._survival = DraftSurvival(num_drafts)
        self._trials = DraftTrials(self.ladder)
        #: the best number of the last choice, and what was chosen
        self._best = self._chosen = num_drafts
        self._recorded_at = float("-inf")
        self._recorded: int | None = None
        if full_width:
            why = "full_width is set: all are verified, whether that pays or not"
            decisions.record("drafts per request", num_drafts, why, "as many as pay")

    # ---- what it knows -------------------------------------------------------------------------

    def use_weights_read(self, target_bytes: int, drafter_bytes: Sequence[int]) -> None:
        """Bytes of the target's weights that a step reads, and of the drafter's, by number of
        drafts. A target of less than `LEAST_BYTES` counts as if it had as many."""
        by = max(target_bytes, LEAST_BYTES)
        self._drafting = [count / by for count in drafter_bytes]
        costs = ", ".join(f"{self._drafting[k]:.3f} for {k}" for k in self.ladder[1:])
        why = f"its weights, {drafter_bytes[-1]} bytes per step at most, by the target's"
        decisions.record(
            "cost of drafting", f"{costs} of reading the target", f"{why}, {target_bytes}"
        )

    def slowdown(self, count: int, num_drafts: int) -> float:
        """Time of a step of `count` decodes with so many drafts, by that of one without."""
        wider = step_cost(count * (1 + num_drafts)) + self._drafting[num_drafts]
        return wider / step_cost(count)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """A step verified so many drafts of a request and accepted so many of them; drafts that
        were not found, or that its grammar barred, count as rejected."""
        self._survival.observe(num_drafts, num_accepted)

    def take_counts(self) -> dict[int, int]:
        """Steps by the drafts per request that they were allowed, since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    # ---- choices -------------------------------------------------------------------------------

    def choose(self, count: int) -> int:
        """Drafts per request of the next step if it decodes so many requests."""
        if count and self.num_drafts:
            if not self._full_width:
                self._chosen = self._worth_most(count)
            self._counts[self._chosen] += 1
        return self._chosen

    def _worth_most(self, count: int) -> int:
        """The best number, or the one to try."""
        could_pay = [k for k in self.ladder if not k or self.slowdown(count, k) * _MARGIN < 1 + k]
        times = {k: self.slowdown(count, k) for k in could_pay}
        accepted = self._survival.accepted()
        worth = {k: (1 + accepted[k]) / times[k] for k in could_pay}
        self._best = self._best_of(worth)
        self._record(count, worth)
        return self._trials.next(count, self._best, times, worth) or self._best

    def _best_of(self, worth: dict[int, float]) -> int:
        best = max(worth, key=worth.__getitem__)
        margin = _MARGIN if best else 1.0
        return best if worth[best] > margin * worth.get(self._best, 0.0) else self._best

    def _record(self, count: int, worth: dict[int, float]) -> None:
        now, best = self._clock(), self._best
        if best == self._recorded or now - self._recorded_at < _SECONDS_BETWEEN_RECORDS:
            return
        self._recorded, self._recorded_at = best, now
        if len(worth) == 1:
            why = f"{count} requests decode: the batch is too large for any acceptance to pay"
        else:
            found = ", ".join(f"{value:.2f} with {k}" for k, value in worth.items())
            why = f"{count} requests decode; output per time, by that without drafts: {found}"
        others = {k: value for k, value in worth.items() if k != best} or {self.num_drafts: 0.0}
        decisions.record("drafts per request", best, why, max(others, key=others.__getitem__))
