# SPDX-License-Identifier: Apache-2.0
"""Batches whose drafts are accepted by known probabilities, and what widths are worth to them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm.v1.core.sched.draft_policy import DraftPolicy

#: bytes of a target's weights, to compare a drafter's with
TARGET = 10**9
#: by its name, what a drafter reads of its own weights to make so many drafts, by the target's
DRAFTERS: dict[str, Callable[[int], float]] = {
    "free": lambda drafts: 0.0,
    "chained": lambda drafts: 0.15 * drafts,
    "block": lambda drafts: 0.3 * (drafts > 0),
    "head": lambda drafts: 0.085 * drafts,
}
#: steps from a choice to what is accepted of it, with asynchronous scheduling
_LATE = 2


def policy_of(num_drafts: int, drafter: str = "free") -> DraftPolicy:
    policy = DraftPolicy(num_drafts, clock=lambda: 0.0)
    reads = [round(TARGET * DRAFTERS[drafter](drafts)) for drafts in range(1 + num_drafts)]
    policy.use_weights_read(TARGET, reads)
    return policy


def time_of(drafts: int, count: int, drafter: str) -> float:
    """Of a step: reading the target's weights, 128 tokens in the same time, and drafting."""
    return 1 + count * (1 + drafts) / 128 + DRAFTERS[drafter](drafts)


def flat(share: float, num_drafts: int) -> list[float]:
    return [share] * num_drafts


def expected(shares: Sequence[float]) -> list[float]:
    """By number of drafts verified, how many are accepted in the mean; `shares`: of the drafts at
    each position, after right ones, those that are right."""
    return [0.0, *np.cumsum(np.cumprod(shares)).tolist()]


@dataclass
class Found:
    """Over some steps: the choices, and how much less output per time they made than the best of
    the ladder would have made, had every step verified as many."""

    chosen: list[int] = field(default_factory=list)
    tokens: float = 0.0
    time: float = 0.0
    #: by drafts per request, output per step and time of one
    fixed: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def best(self) -> int:
        return max(self.fixed, key=lambda k: self.fixed[k][0] / self.fixed[k][1])

    @property
    def loss(self) -> float:
        tokens, time = self.fixed[self.best]
        return 1 - (self.tokens / self.time) / (tokens / time)

    @property
    def usual(self) -> int:
        return Counter(self.chosen).most_common(1)[0][0]


class Process:
    """Steps of a batch. Output is counted by its expectation: a choice is judged, not its luck."""

    def __init__(self, policy: DraftPolicy, drafter: str, count: int, seed: int = 0) -> None:
        self.policy, self.drafter, self.count = policy, drafter, count
        self._source = np.random.default_rng(seed)
        self._in_flight = deque[tuple[int, list[int]]]()

    def run(self, steps: int, *kinds: Sequence[float], stay: int | None = None) -> Found:
        """`kinds`: shares by position of kinds of requests, equally many of each. Requests `stay`
        so many steps in the mean; others come, of a kind at random."""
        ladder = self.policy.ladder
        times = {k: time_of(k, self.count, self.drafter) for k in ladder}
        found, output = Found(), dict.fromkeys(ladder, 0.0)
        for mean, right in self._batches(steps, kinds, stay):
            drafts = self.policy.choose(self.count)
            found.chosen.append(drafts)
            found.tokens += mean[drafts]
            found.time += times[drafts]
            for k in ladder:
                output[k] += mean[k]
            self._verify(drafts, right)
        found.fixed = {k: (output[k] / steps, times[k]) for k in ladder}
        return found

    def _batches(
        self, steps: int, kinds: Sequence[Sequence[float]], stay: int | None
    ) -> Iterator[tuple[list[float], np.ndarray]]:
        """Of each step: its output in the mean, by number of drafts verified, and how many drafts
        of each request are right. Those of requests that stay are drawn together."""
        shares = np.array(kinds)
        gains = np.array([expected(one) for one in kinds])
        kind = np.arange(self.count) % len(kinds)
        together = steps if stay is None else 1
        for _ in range(steps // together):
            mean = (1 + gains[kind].mean(axis=0)).tolist()
            for right in self._num_right(together, shares[kind]):
                yield mean, right
            if stay is not None:
                left = self._source.random(self.count) < 1 / stay
                kind = np.where(left, self._source.integers(len(kinds), size=self.count), kind)

    def _num_right(self, steps: int, shares: np.ndarray) -> np.ndarray:
        """`[steps, requests]`, up to the first draft that is wrong."""
        right = self._source.random((steps, *shares.shape)) < shares
        return np.logical_and.accumulate(right, axis=2).sum(axis=2)

    def _verify(self, drafts: int, right: np.ndarray) -> None:
        self._in_flight.append((drafts, np.minimum(right, drafts).tolist()))
        if len(self._in_flight) > _LATE:
            verified, counts = self._in_flight.popleft()
            for count in counts if verified else ():
                self.policy.observe(verified, count)
