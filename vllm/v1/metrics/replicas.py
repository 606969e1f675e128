# SPDX-License-Identifier: Apache-2.0
"""Metrics of several replicas under the same names, told apart by the label `engine`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from vllm.v1.metrics.merge import merged


def registries_of_replicas(registry: CollectorRegistry, count: int) -> list[CollectorRegistry]:
    """A registry for each replica, which `registry` shows together; itself for one."""
    if count == 1:
        return [registry]
    registries = [CollectorRegistry() for _ in range(count)]
    registry.register(_Together(registries))
    return registries


class _Together(Collector):
    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Each metric once, with the samples of all."""
        return iter(merged([list(registry.collect()) for registry in self._registries]))
