# SPDX-License-Identifier: Apache-2.0
"""From measured requests to the figures of a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.benchmarks.outcome import Outcome

#: key -> what the table calls it
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
#: metrics of whole requests, on which a service level can be set
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Distribution:
    """Of `count` values, in milliseconds; all zero when there was nothing to measure."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of_seconds(cls, values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
        if not values:
            return cls(0, 0.0, 0.0, 0.0, dict.fromkeys(percentiles, 0.0))
        ms = np.asarray(values) * 1000
        at = {p: float(np.percentile(ms, p)) for p in percentiles}
        return cls(len(values), float(ms.mean()), float(np.median(ms)), float(ms.std()), at)


@dataclass(frozen=True)
class Summary:
    """Figures of a whole run, under the names that readers of result files expect; throughputs per
    second, `request_goodput` None when no level was set."""

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    latencies: dict[str, Distribution]


def summarize(
    outcomes: Sequence[Outcome],
    duration: float,
    percentiles: Sequence[float],
    levels_ms: dict[str, float] | None = None,
) -> Summary:
    """Figures of the requests that succeeded; `levels_ms` are the goodput limits per metric."""
    done = [o for o in outcomes if o.error is None]
    tokens_in = sum(o.prompt_len for o in done)
    tokens_out = sum(o.output_len for o in done)
    seconds = {
        "ttft": [o.ttft for o in done if o.output_len],
        "tpot": [o.tpot for o in done if o.tpot is not None],
        "itl": [gap for o in done for gap in o.itl],
        "e2el": [o.latency for o in done],
    }
    return Summary(
        completed=len(done),
        failed=len(outcomes) - len(done),
        duration=duration,
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        request_throughput=len(done) / duration,
        output_throughput=tokens_out / duration,
        total_token_throughput=(tokens_in + tokens_out) / duration,
        request_goodput=_goodput(done, duration, levels_ms) if levels_ms else None,
        max_output_tokens_per_s=max(output_rate(done), default=0.0),
        max_concurrent_requests=_max_concurrent(outcomes),
        latencies={
            name: Distribution.of_seconds(values, percentiles) for name, values in seconds.items()
        },
    )


def _goodput(done: Sequence[Outcome], duration: float, levels_ms: dict[str, float]) -> float:
    """Requests per second that met every level; one token has no time per token to exceed."""

    def meets(outcome: Outcome) -> bool:
        seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
        return all(seconds[name] * 1000 <= limit for name, limit in levels_ms.items())

    return sum(map(meets, done)) / duration


def output_rate(done: Sequence[Outcome]) -> list[float]:
    """Output tokens in each second of the run. A chunk counts as its share of the output."""
    if not done:
        return []
    times, weights = [], []
    for outcome in done:
        chunks = np.cumsum([outcome.start + outcome.ttft, *outcome.itl])
        times.append(chunks)
        weights.append(np.full(len(chunks), outcome.output_len / len(chunks)))
    return list(np.bincount(np.concatenate(times).astype(int), np.concatenate(weights)))


def _max_concurrent(outcomes: Sequence[Outcome]) -> int:
    """Most requests in flight at once; one that ends when another starts does not overlap it."""
    events = [(o.start, 1) for o in outcomes] + [(o.start + o.latency, -1) for o in outcomes]
    running = highest = 0
    for _, change in sorted(events):
        running += change
        highest = max(highest, running)
    return highest
