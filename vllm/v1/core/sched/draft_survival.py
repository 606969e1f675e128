# SPDX-License-Identifier: Apache-2.0
"""How many drafts a request is expected to accept, by how many a step verifies, from what steps
did."""

from __future__ import annotations

from collections import Counter

#: verifications of a position that count as much as all before them
_MEMORY = 256
#: tries for which the position before speaks, and at first, for the first, this share
_PRIOR, _FIRST = 4.0, 0.8


class DraftSurvival:
    """Draft `i` is *tried* where a step verifies it and accepted all before it. The share of tries
    that were accepted, position by position, is the product-limit estimate of how long runs of
    accepted drafts are (Kaplan and Meier, "Nonparametric estimation from incomplete observations",
    1958): a step of fewer drafts is no try of those past them, so it says nothing of these, and
    nothing known of them is forgotten. Where a step verifies a position, older tries of it count
    less, also if the step was no try. One that was hardly tried is expected to be like the one
    before.

    Tries of all requests count together. All decodes of a step verify equally many drafts, so what
    decides is their mean; and the product of the shares is that mean, however unlike the requests
    are. The mean of products of shares of each request would be wrong by the noise of each.
    """

    def __init__(self, num_drafts: int) -> None:
        self._tries = [_PRIOR, *[0.0] * (num_drafts - 1)][:num_drafts]
        self._accepted = [_FIRST * count for count in self._tries]
        #: observations by drafts verified and accepted that are not yet in the shares
        self._seen: Counter[tuple[int, int]] = Counter()
        self._update()

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """A step verified so many drafts of a request and accepted so many."""
        self._seen[num_drafts, num_accepted] += 1

    def accepted(self) -> list[float]:
        """`[1 + num_drafts]`: by how many drafts a step verifies of a request, how many it is
        expected to accept."""
        if self._seen:
            self._count()
            self._update()
        return self._expected

    def _count(self) -> None:
        """Take in what was seen."""
        for i in range(len(self._tries)):
            verified = [(good, n) for (drafts, good), n in self._seen.items() if drafts > i]
            tried = sum(n for good, n in verified if good >= i)
            accepted = sum(n for good, n in verified if good > i)
            kept = _MEMORY / (_MEMORY + sum(n for _, n in verified))
            self._tries[i] = kept * self._tries[i] + tried
            self._accepted[i] = kept * self._accepted[i] + accepted
        self._seen.clear()

    def _update(self) -> None:
        share, prior, survival = 0.0, 0.0, 1.0
        self._expected = [0.0]
        for tries, accepted in zip(self._tries, self._accepted, strict=True):
            share = (accepted + prior * share) / (tries + prior)
            survival *= share
            self._expected.append(self._expected[-1] + survival)
            prior = _PRIOR
