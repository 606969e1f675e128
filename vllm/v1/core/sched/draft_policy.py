# SPDX-License-Identifier: Apache-2.0
"""How many drafts the next step verifies: measured acceptance against what the wider step costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from vllm import decisions
from vllm.config.draft_ladder import draft_ladder
from vllm.v1.core.sched.draft_survival import DraftSurvival
from vllm.v1.request import Request

#: tokens whose computation takes a step as long as reading the weights does
BALANCE = 128
#: weights that take no time to read beside the rest of a step: tiny models' are fewer
LEAST_BYTES = 2**26
#: by what another choice has to be better, in output per time
_MARGIN = 1.02
#: steps of a trial of more drafts, the fewest steps between two, and the most that trials may add
#: to the time of all steps
_TRIAL, _PAUSE, _TRIALS_SHARE = 4, 32, 0.01
_SECONDS_BETWEEN_RECORDS = 10.0


def step_cost(num_tokens: int) -> float:
    """Time of a step of `num_tokens`, of which the first is nearly all: weights are read once."""
    return 1 + num_tokens / BALANCE


class DraftPolicy:
    """Chooses how many drafts per request the next step verifies, a number of `ladder`, for all
    decodes of the step: its kernels run one width, so a request with fewer would cost as much.

    A number is worth the tokens that a step is expected to output (`DraftSurvival`) by the time it
    takes: `step_cost` of its tokens, and what the drafter reads of its own weights to propose them
    (`use_weights_read`). A number is left for one that is better by `_MARGIN`, so that noise
    changes nothing: the first step of another width costs more than the others. For 0 it is left
    as soon as it costs more than it gains.

    Steps say nothing of drafts that they do not verify. So larger numbers than the best are tried
    for a few steps now and then, as seldom as `_TRIALS_SHARE` of the time allows, of which each has
    an equal part; not those that could not pay even if all drafts were accepted, the batch being so
    large.
    """

    def __init__(self, num_drafts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_drafts = num_drafts
        self.ladder = draft_ladder(num_drafts)
        #: steps by the drafts they were allowed, since `take_counts`
        self._counts: Counter[int] = Counter()
        self._clock = clock
        #: what drafting takes, by number of drafts, in units of reading the target's weights once
        self._drafting = [0.0] * (1 + num_drafts)
        self._survival = DraftSurvival(num_drafts)
        #: the decodes of the last choice and, by number of drafts, what they gain, until the next
        #: observation
        self._last: tuple[Sequence[Request], np.ndarray] | None = None
        #: the best number of the last choice, and what was chosen
        self._best = self._chosen = num_drafts
        #: by number, the time that its next trial may add; in the order of their last trials
        self._saved = dict.fromkeys(self.ladder, 0.0)
        self._trials = list(self.ladder)
        #: steps since the last trial began, and steps left of it
        self._steps = self._left = 0
        self._recorded_at = float("-inf")
        self._recorded: int | None = None

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

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step verified so many drafts of the request and accepted so many of them; drafts that
        were not found, or that its grammar barred, count as rejected."""
        self._survival.observe(request, num_drafts, num_accepted)
        self._last = None

    def take_counts(self) -> dict[int, int]:
        """Steps by the drafts per request that they were allowed, since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    # ---- choices -------------------------------------------------------------------------------

    def choose(self, decodes: Sequence[Request]) -> int:
        """Drafts per request of the next step if it decodes these. A list that was asked about in
        the last choice is taken to hold the same requests."""
        count = len(decodes)
        if not count or not self.num_drafts:
            return self._chosen
        able = [k for k in self.ladder[1:] if self.slowdown(count, k) * _MARGIN < 1 + k]
        gains = 1 + self._gained(decodes) / count
        worth = {k: float(gains[k]) / self.slowdown(count, k) for k in (0, *able)}
        self._best = self._best_of(worth)
        self._chosen = self._tried(count, able) or self._best
        self._counts[self._chosen] += 1
        self._record(count, worth)
        return self._chosen

    def _best_of(self, worth: dict[int, float]) -> int:
        best = max(worth, key=worth.__getitem__)
        margin = _MARGIN if best else 1.0
        return best if worth[best] > margin * worth.get(self._best, 0.0) else self._best

    def _tried(self, count: int, able: Sequence[int]) -> int:
        """The number to try in this step, 0 for none."""
        more = [k for k in able if k > self._best]
        self._left = self._left - 1 if self._left and self._trials[-1] in more else 0
        if self._left:
            return self._trials[-1]
        self._steps += 1
        plain, own = step_cost(count), self.slowdown(count, self._best)
        ready = set()
        for k in more:
            needed = _TRIAL * (self.slowdown(count, k) - own) * plain
            saved = self._saved[k] + _TRIALS_SHARE / len(more) * own * plain
            self._saved[k] = min(saved, needed)
            if saved >= needed:
                ready.add(k)
        if self._steps <= _PAUSE or not ready:
            return 0
        tried = next(k for k in self._trials if k in ready)
        self._trials.remove(tried)
        self._trials.append(tried)
        self._saved[tried], self._steps, self._left = 0.0, 0, _TRIAL
        return tried

    def _gained(self, decodes: Sequence[Request]) -> np.ndarray:
        """By number of drafts, how many of theirs a step is expected to accept."""
        if self._last is None or self._last[0] is not decodes:
            self._last = decodes, self._survival.accepted(decodes)
        return self._last[1]

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
