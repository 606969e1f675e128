# SPDX-License-Identifier: Apache-2.0
"""When a step verifies more drafts than seem best, for what it tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: requests whose drafts a trial sees, and its steps at most
_SEEN, _STEPS = 16, 4
#: steps between two trials at least
_PAUSE = 32
#: the share of the time of all steps that trials may lose, and what a step of one loses at least
_SHARE, _LEAST = 0.01, 0.005


class DraftTrials:
    """Steps say nothing of drafts that they do not verify, so an estimate that is too low would
    stay so for ever. Each number of drafts that is larger than the best one is tried for a few
    steps again and again. A trial may come when it has saved what it loses by the present
    estimates: a number that is nearly as good as the best loses little and is tried often, one that
    is far from it seldom. What a step outputs grows with its drafts, so none loses more than its
    longer time. All numbers share `_SHARE` of the time.
    """

    def __init__(self, ladder: Sequence[int]) -> None:
        #: by number, the time that its next trial may lose; in the order of their last trials
        self._saved = dict.fromkeys(ladder, 0.0)
        self._tried = 0
        #: steps since the last trial began, and steps left of it
        self._since = self._left = 0

    def next(
        self, count: int, best: int, times: Mapping[int, float], worth: Mapping[int, float]
    ) -> int:
        """The number to try in this step of `count` decodes, 0 for none. By number, of those that
        could pay: `times` of their steps, and `worth`, their output by these."""
        more = [k for k in worth if k > best]
        if self._left and self._tried in more:
            self._left -= 1
            return self._tried
        self._left = 0
        self._since += 1
        steps = min(_STEPS, -(-_SEEN // count))
        ready = []
        for k in more:
            loss = steps * times[k] * max(1 - worth[k] / worth[best], _LEAST)
            saved = self._saved[k] + _SHARE / len(more) * times[best]
            self._saved[k] = min(saved, loss)
            if saved >= loss:
                ready.append(k)
        if self._since <= _PAUSE or not ready:
            return 0
        self._tried = next(k for k in self._saved if k in ready)
        # It is the last in turn now.
        del self._saved[self._tried]
        self._saved[self._tried] = 0.0
        self._since, self._left = 0, steps - 1
        return self._tried
