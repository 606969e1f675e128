# SPDX-License-Identifier: Apache-2.0
"""When requests are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Load:
    """Requests per second. With a ramp the rate goes from `rate` to `end_rate` over the requests.

    `burstiness` is the shape of the gamma distribution of the gaps: 1 is a Poisson process, below
    1 requests come in bursts, above 1 they come more evenly.
    """

    rate: float
    burstiness: float = 1.0
    ramp: Literal["linear", "exponential"] | None = None
    end_rate: float | None = None

    def __post_init__(self) -> None:
        rates = [self.rate] if self.end_rate is None else [self.rate, self.end_rate]
        if min(rates) <= 0 or self.burstiness <= 0:
            raise ValueError("request rates and burstiness must be positive")
        if (self.ramp is None) != (self.end_rate is None):
            raise ValueError("a ramp needs a strategy, a start rate and an end rate")
        if self.ramp is not None and not all(map(math.isfinite, rates)):
            raise ValueError("a ramp needs finite rates")

    @property
    def peak_rate(self) -> float:
        """The highest mean rate at any time."""
        return max(self.rate, self.end_rate or 0.0)


def arrival_times(load: Load, count: int, seed: int) -> NDArray[np.float64]:
    """Seconds from the start of the benchmark, `[count]`, ascending; the first one is 0."""
    if math.isinf(load.rate):
        return np.zeros(count)
    progress = np.arange(count) / max(1, count - 1)
    if load.end_rate is None:
        rates = np.full(count, load.rate)
    elif load.ramp == "linear":
        rates = load.rate + (load.end_rate - load.rate) * progress
    else:
        rates = load.rate * (load.end_rate / load.rate) ** progress
    gaps = np.random.default_rng(seed).gamma(load.burstiness, 1 / load.burstiness, count) / rates
    gaps[0] = 0.0
    times: NDArray[np.float64] = np.cumsum(gaps)
    return times
