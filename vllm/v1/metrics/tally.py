# SPDX-License-Identifier: Apache-2.0
"""A histogram for many equal values."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Histogram


class TallyHistogram(Histogram):
    """`prometheus_client`'s histogram, which takes a value several times at the cost of one."""

    def observe_often(self, amount: float, count: int) -> None:
        """The same as `count` calls of `observe(amount)`."""
        self._raise_if_not_observable()
        self._sum.inc(amount * count)
        bucket = min(bisect_left(self._upper_bounds, amount), len(self._upper_bounds) - 1)
        self._buckets[bucket].inc(count)
