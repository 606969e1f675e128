# SPDX-License-Identifier: Apache-2.0
"""Metrics of several processes as one server's."""

from __future__ import annotations

import pickle

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm.v1.metrics.merge import as_text, merged, snapshot, total, without_gauges


def process(tokens: int, running: int, seconds: list[float], resident: float) -> list:
    registry = CollectorRegistry()
    counter = Counter("vllm:tokens", "Tokens.", ["model"], registry=registry).labels("m")
    counter.inc(tokens)
    Gauge("vllm:running", "Running.", registry=registry).set(running)
    Gauge("process_resident_memory_bytes", "Memory.", registry=registry).set(resident)
    times = Histogram("vllm:time", "Time.", registry=registry, buckets=(0.1, 1.0))
    for one in seconds:
        times.observe(one)
    return pickle.loads(pickle.dumps(snapshot([registry])))


def lines(metrics: list) -> set[str]:
    return {one for one in as_text(metrics).decode().splitlines() if "_created" not in one}


def test_counters_add_up_and_gauges_are_known_by_one() -> None:
    both = lines(merged([process(3, 5, [0.05, 0.5], 100.0), process(4, 0, [7.0], 11.0)]))
    assert both >= {
        'vllm:tokens_total{model="m"} 7.0',
        "vllm:running 5.0",
        "process_resident_memory_bytes 111.0",
        'vllm:time_bucket{le="0.1"} 1.0',
        'vllm:time_bucket{le="1.0"} 2.0',
        'vllm:time_bucket{le="+Inf"} 3.0',
        "vllm:time_count 3.0",
        "vllm:time_sum 7.55",
        "# TYPE vllm:time histogram",
    }


def test_one_process_is_shown_as_it_is() -> None:
    alone = process(3, 5, [0.5], 1.0)
    assert lines(merged([alone])) == lines(alone)


def test_what_a_dead_process_counted_still_counts() -> None:
    gone = without_gauges(process(3, 5, [0.5], 100.0))
    shown = merged([process(4, 1, [], 7.0), gone])
    assert total(shown, "vllm:tokens_total") == 7.0
    assert lines(shown) >= {"vllm:running 1.0", "process_resident_memory_bytes 7.0"}
    assert total(shown, "vllm:nothing") == 0
