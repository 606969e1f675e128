# SPDX-License-Identifier: Apache-2.0
"""Numbers a connector reports about itself, merged over steps and ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from prometheus_client import Counter, Gauge, Histogram
from typing_extensions import Self

from vllm.config import VllmConfig


@dataclass
class KVConnectorStats(ABC):
    """One interval's numbers; `data` must survive pickling and msgpack."""

    data: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def reset(self) -> None:
        """Start a new interval."""

    @abstractmethod
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Merge another interval or rank into this one and return it."""

    @abstractmethod
    def reduce(self) -> dict[str, int | float]:
        """The figures to log."""

    @abstractmethod
    def is_empty(self) -> bool: ...


class CounterStats(KVConnectorStats):
    """Counts since the last report, which add up over intervals and ranks."""

    def reset(self) -> None:
        self.data = {}

    def add(self, **counts: float) -> None:
        for key, count in counts.items():
            self.data[key] = self.data.get(key, 0) + count

    def aggregate(self, other: KVConnectorStats) -> Self:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KVConnectorPromMetrics(ABC):
    """A connector's own Prometheus metrics, made in the front end by `build_prom_metrics`.

    `metric_types`: prometheus_client's `Gauge`, `Counter` and `Histogram` -> what makes one in the
    engine's registry. `per_engine_labelvalues`: engine index -> values of `labelnames`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._gauge_cls = metric_types[Gauge]
        self._counter_cls = metric_types[Counter]
        self._histogram_cls = metric_types[Histogram]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues
        self.make_metrics(labelnames)

    def make_metrics(self, labelnames: list[str]) -> None:  # noqa: B027
        """Called once by the constructor, which knows by now how metrics are made."""

    @abstractmethod
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the `data` of the connector's statistics since the last call."""


class CounterPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per key of `CounterStats`."""

    #: key of the statistics -> metric without `vllm:`, its help
    counters: ClassVar[dict[str, tuple[str, str]]]

    def make_metrics(self, labelnames: list[str]) -> None:
        self._counters = {
            key: self._counter_cls(f"vllm:{name}", text, labelnames)
            for key, (name, text) in self.counters.items()
        }
        for values in self.per_engine_labelvalues.values():
            for metric in self._counters.values():
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            self._counters[key].labels(*values).inc(value)
