# SPDX-License-Identifier: Apache-2.0
"""The metrics of several processes as those of one server."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_Key = tuple[str, tuple[tuple[str, str], ...]]
_ADDED = ("counter", "histogram", "summary")
#: gauges of a process that add up; of all other gauges, the largest is the one that is known
_ADDED_GAUGES = frozenset(
    {"process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds"}
)
_CREATED = "_created"
_STARTED = "process_start_time_seconds"


def snapshot(registries: Iterable[CollectorRegistry]) -> list[Metric]:
    """All metrics of one process; can be pickled."""
    return [metric for registry in registries for metric in registry.collect()]


def without_gauges(metrics: Iterable[Metric]) -> list[Metric]:
    """What stays true of a process that is gone."""
    return [metric for metric in metrics if metric.type in _ADDED]


def merged(snapshots: Iterable[Sequence[Metric]]) -> list[Metric]:
    """Counters and histograms are added, sample by sample; see `_ADDED_GAUGES` for the others."""
    families: dict[str, tuple[Metric, dict[_Key, float]]] = {}
    for metrics in snapshots:
        for metric in metrics:
            kept = families.get(metric.name)
            if kept is None:
                kept = families[metric.name] = (metric, {})
            for sample in metric.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                value = kept[1].get(key)
                combine = _combination(metric, sample)
                kept[1][key] = sample.value if value is None else combine(value, sample.value)
    return [_family(metric, values) for metric, values in families.values()]


def _combination(metric: Metric, sample: Sample) -> Callable[[float, float], float]:
    if sample.name.endswith(_CREATED) or sample.name == _STARTED:
        return min
    if metric.type in _ADDED or metric.name in _ADDED_GAUGES:
        return operator.add
    return max


def _family(metric: Metric, values: dict[_Key, float]) -> Metric:
    family = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    for (name, labels), value in values.items():
        family.add_sample(name, dict(labels), value)
    return family


class _Fixed(Collector):
    """Metrics that are there already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def as_text(metrics: list[Metric]) -> bytes:
    """As `/metrics` shows them."""
    registry = CollectorRegistry()
    registry.register(_Fixed(metrics))
    return generate_latest(registry)


def total(metrics: Iterable[Metric], name: str) -> float:
    """The sum of a counter over its labels; 0 if there is none."""
    return sum(s.value for metric in metrics for s in metric.samples if s.name == name)
