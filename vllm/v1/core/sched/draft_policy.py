# SPDX-License-Identifier: Apache-2.0
"""Whether the next step verifies drafts: measured acceptance against what the wider step costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm import decisions
from vllm.v1.request import Request

#: tokens whose computation takes a step as long as reading the weights does
BALANCE = 128
#: weights that take no time to read beside the rest of a step: tiny models' are fewer
LEAST_BYTES = 2**26
#: weight of a request's newest verification in its yield
_NEWEST = 0.2
#: what drafting has to gain beyond what it costs
_MARGIN = 1.02
#: steps of a trial of what did not pay, the fewest steps between two, and the most that trials may
#: add to the time of all steps
_TRIAL, _PAUSE, _TRIALS_SHARE = 4, 32, 0.01
_SECONDS_BETWEEN_RECORDS = 10.0


def step_cost(num_tokens: int) -> float:
    """Time of a step of `num_tokens`, of which the first is nearly all: weights are read once."""
    return 1 + num_tokens / BALANCE


class DraftPolicy:
    """Chooses between no drafts and `num_drafts` per request, for all decodes of a step: its
    kernels run one width, so a request without drafts would cost as much beside others with them.

    A request's *yield* is the mean number of drafts that were accepted in its last steps that
    verified any, those for which the drafter found none included. Drafting pays while the output of
    a step grows by more than its time does (`step_cost`). Where it does not, it is tried for a few
    steps now and then, the more seldom the more a trial costs, unless the batch is so large that
    not even full acceptance would pay.

    A step that drafts reads the drafter's weights besides (`use_weights_read`).
    """

    def __init__(self, num_drafts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_drafts = num_drafts
        self._clock = clock
        #: what drafting takes, in units of reading the target's weights once
        self._drafting = 0.0
        #: the yield that a new request is expected to have
        self._expected = float(num_drafts)
        #: the decodes of the last choice and what drafting gains with them, until a yield changes
        self._last: tuple[Sequence[Request], float] | None = None
        self._pays = True
        self._steps = 0
        self._recorded_at = float("-inf")
        self._recorded: bool | None = None

    def use_weights_read(self, target_bytes: int, drafter_bytes: int) -> None:
        """Bytes of the target's weights that a step reads, and of the drafter's if it drafts. A
        target of less than `LEAST_BYTES` counts as if it had as many."""
        self._drafting = drafter_bytes / max(target_bytes, LEAST_BYTES)
        why = f"its weights, {drafter_bytes} bytes per step, by the target's, {target_bytes}"
        decisions.record("cost of drafting", f"{self._drafting:.3f} of reading the target", why)

    def slowdown(self, count: int) -> float:
        """Time of a step of `count` decodes with drafts, by that of one without."""
        wider = step_cost(count * (1 + self.num_drafts)) + self._drafting
        return wider / step_cost(count)

    def observe(self, request: Request, num_accepted: int) -> None:
        """A step verified drafts of the request and accepted so many."""
        before = self._yield_of(request)
        request.draft_yield = before + _NEWEST * (num_accepted - before)
        self._last = None
        self._expected += _NEWEST / 8 * (num_accepted - self._expected)

    def choose(self, decodes: Sequence[Request]) -> int:
        """Drafts per request of the next step if it decodes these. A list that was asked about in
        the last choice is taken to hold the same requests."""
        count = len(decodes)
        if not count or not self.num_drafts:
            return self.num_drafts
        ratio = self.slowdown(count)
        most = 1.0 + self.num_drafts
        if ratio * _MARGIN >= most:
            return self._turn(False, count, "the batch is too large for any acceptance to pay")
        pays = 1 + self._gained(decodes) / count > ratio * _MARGIN
        if pays:
            return self._turn(True, count, "steps gain more tokens than they take longer")
        pause = max(_PAUSE, int(_TRIAL * (ratio - 1) / _TRIALS_SHARE))
        self._steps = 0 if self._pays else self._steps + 1
        if self._steps > pause:
            if self._steps == pause + _TRIAL:
                self._steps = 0
            return self.num_drafts
        return self._turn(False, count, "too few drafts are accepted for what they cost")

    def _gained(self, decodes: Sequence[Request]) -> float:
        """Drafts of theirs that a step is expected to accept."""
        if self._last is None or self._last[0] is not decodes:
            self._last = decodes, sum(self._yield_of(request) for request in decodes)
        return self._last[1]

    def _yield_of(self, request: Request) -> float:
        return self._expected if request.draft_yield is None else request.draft_yield

    def _turn(self, pays: bool, count: int, why: str) -> int:
        self._pays = pays
        if pays:
            self._steps = 0
        chosen = self.num_drafts if pays else 0
        now = self._clock()
        if pays != self._recorded and now - self._recorded_at >= _SECONDS_BETWEEN_RECORDS:
            self._recorded, self._recorded_at = pays, now
            other = 0 if pays else self.num_drafts
            decisions.record("drafts per request", chosen, f"{count} requests decode: {why}", other)
        return chosen
