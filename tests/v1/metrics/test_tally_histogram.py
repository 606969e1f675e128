# SPDX-License-Identifier: Apache-2.0
"""Many equal observations at once."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from vllm.v1.metrics.engine_metrics import TallyHistogram


def test_many_equal_observations_are_as_many_single_ones() -> None:
    texts = []
    for batched in (True, False):
        registry = CollectorRegistry()
        kind = TallyHistogram if batched else Histogram
        made = kind("h", "help", ["a"], registry=registry, buckets=(0.1, 1.0, 5.0)).labels("x")
        for value, count in ((0.0, 1), (0.1, 3), (0.5, 2), (1.0, 4), (7.0, 2), (math.inf, 1)):
            if batched:
                made.observe_often(value, count)
            else:
                for _ in range(count):
                    made.observe(value)
        lines = generate_latest(registry).decode().splitlines()
        texts.append([line for line in lines if "_created" not in line])
    assert texts[0] == texts[1]
