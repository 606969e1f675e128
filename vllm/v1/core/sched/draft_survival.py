# SPDX-License-Identifier: Apache-2.0
"""How many drafts a step is expected to accept, by how many it verifies, from what steps did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from vllm.v1.request import Request

#: tries at a position that count as much as all before them
_MEMORY = 256
#: tries for which the position before speaks at one that has not been tried
_PRIOR = 1.0
#: weight of a request's verification in the next one, and tries for which all requests speak
_KEPT, _OTHERS = 0.95, 16
#: the least share of rejections that a request is measured by
_LEAST = 1 / 64


class DraftSurvival:
    """Draft `i` is *tried* where a step verifies it and accepted all before it. The share of tries
    that were accepted, position by position, is the product-limit estimate of how long runs of
    accepted drafts are (Kaplan and Meier, "Nonparametric estimation from incomplete observations",
    1958): a step of fewer drafts is no try of those past them, so it says nothing of these. Old
    tries are forgotten by newer ones of the same position. One that was never tried is expected to
    be like the one before, and the first to be accepted.

    A request's own part is one factor on the shares of rejections: its rejections by those that
    were expected of it, in its last verifications. The expectation is for the positions that it
    tried, so the factor does not depend on how many drafts its steps verify.
    """

    def __init__(self, num_drafts: int) -> None:
        self._tries = np.zeros(num_drafts)
        self._accepted = np.zeros(num_drafts)
        #: observations by drafts verified and accepted that are not yet in the shares
        self._seen: Counter[tuple[int, int]] = Counter()
        self._update()

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step verified so many drafts of a request and accepted so many."""
        self._seen[num_drafts, num_accepted] += 1
        rejected = num_accepted < num_drafts
        expected = self._expected[num_accepted + rejected]
        request.drafts_rejected = _KEPT * request.drafts_rejected + rejected
        request.rejections_expected = _KEPT * request.rejections_expected + expected

    def accepted(self, requests: Sequence[Request]) -> np.ndarray:
        """Of the next step of these, `[1 + num_drafts]`: how many drafts it is expected to accept
        of all of them together, by how many it verifies of each."""
        if self._seen:
            self._count()
        rejected = np.array([request.drafts_rejected for request in requests])
        expected = np.array([request.rejections_expected for request in requests])
        others = _OTHERS * max(float(self._rejected[0]), _LEAST)
        factors = (rejected + others) / (expected + others)
        shares = np.minimum(factors[:, None] * self._rejected, 1)
        survival = np.cumprod(1 - shares, axis=1).sum(axis=0)
        return np.concatenate([[0.0], np.cumsum(survival)])

    def _count(self) -> None:
        """Take in what was seen."""
        tries, accepted = np.zeros_like(self._tries), np.zeros_like(self._tries)
        for (verified, good), count in self._seen.items():
            accepted[:good] += count
            tries[: min(good + 1, verified)] += count
        self._seen.clear()
        kept = _MEMORY / (_MEMORY + tries)
        self._tries = kept * self._tries + tries
        self._accepted = kept * self._accepted + accepted
        self._update()

    def _update(self) -> None:
        before, rejected = 1.0, []
        for tries, accepted in zip(self._tries.tolist(), self._accepted.tolist(), strict=True):
            before = (accepted + _PRIOR * before) / (tries + _PRIOR)
            rejected.append(1 - before)
        #: by position, the share of tries that are rejected
        self._rejected = np.array(rejected)
        #: by tries of one verification, the rejections expected of them
        self._expected = [0.0, *np.cumsum(self._rejected).tolist()]
