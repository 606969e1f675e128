# SPDX-License-Identifier: Apache-2.0
"""Numbers a connector reports about itself, merged over steps and ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
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

    @abstractmethod
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the `data` of the connector's statistics since the last call."""
