# SPDX-License-Identifier: Apache-2.0
"""The engine's metrics as objects, for offline use (`LLM.get_metrics`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as PrometheusMetric
from prometheus_client.samples import Sample

_PREFIX = "vllm:"
#: counters whose `position` label becomes the index of a vector
_VECTORS = frozenset(
    f"vllm:spec_decode_num_{kind}_tokens_per_pos" for kind in ("draft", "accepted")
)


@dataclass
class Metric:
    """Base of all metrics. `name` has no `_total`."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """Only ever grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A value of now."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations: `buckets` maps an upper bound to how many were at most that."""

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot(registry: CollectorRegistry) -> list[Metric]:
    """All `vllm:` metrics of this process."""
    collected: list[Metric] = []
    for metric in registry.collect():
        if metric.name.startswith(_PREFIX):
            collected += _convert(metric)
    return collected


def _convert(metric: PrometheusMetric) -> Iterator[Metric]:
    if metric.type == "gauge":
        for sample in metric.samples:
            yield Gauge(metric.name, sample.labels, sample.value)
    elif metric.type == "counter":
        samples = [s for s in metric.samples if s.name == f"{metric.name}_total"]
        if metric.name in _VECTORS:
            yield from _vectors(metric.name, samples)
        else:
            for sample in samples:
                yield Counter(metric.name, sample.labels, int(sample.value))
    elif metric.type == "histogram":
        yield from _histograms(metric)


def _without(labels: dict[str, str], key: str) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name != key}


def _grouped(samples: list[Sample], key: str) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    """Samples with equal labels apart from `key`."""
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        identity = tuple(sorted(_without(sample.labels, key).items()))
        groups.setdefault(identity, []).append(sample)
    for identity, members in groups.items():
        yield dict(identity), members


def _vectors(name: str, samples: list[Sample]) -> Iterator[Vector]:
    for labels, members in _grouped(samples, "position"):
        values = [0] * (1 + max(int(s.labels["position"]) for s in members))
        for sample in members:
            values[int(sample.labels["position"])] = int(sample.value)
        yield Vector(name, labels, values)


def _histograms(metric: PrometheusMetric) -> Iterator[Histogram]:
    for labels, members in _grouped(metric.samples, "le"):
        count, total, buckets = 0, 0.0, {}
        for sample in members:
            if sample.name == f"{metric.name}_bucket":
                buckets[sample.labels["le"]] = int(sample.value)
            elif sample.name == f"{metric.name}_count":
                count = int(sample.value)
            elif sample.name == f"{metric.name}_sum":
                total = sample.value
        yield Histogram(metric.name, labels, count, total, buckets)
