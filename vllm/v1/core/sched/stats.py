# SPDX-License-Identifier: Apache-2.0
"""What a scheduler tells of itself: gauges, and counts since it last did."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.engine import SchedulerStats

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class Gauges(NamedTuple):
    """What is sent whenever it has changed."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0


class UnsentStats:
    """What happened since statistics were last sent, and what these said."""

    def __init__(self) -> None:
        self.counters = SchedulerStats()
        self._connector: KVConnectorStats | None = None
        self._sent_gauges = Gauges()

    def add_of_connector(self, stats: KVConnectorStats) -> None:
        """What the connector counted in a step, which may already have come for another one."""
        before = self._connector
        self._connector = stats if before is None else before.aggregate(stats)

    def have_changed(self, gauges: Gauges) -> bool:
        """Whether `gauges` are others than were sent."""
        return gauges != self._sent_gauges

    def are_news(self, gauges: Gauges) -> bool:
        """Whether a step in which no request did anything has something to tell."""
        return self._connector is not None or self.have_changed(gauges)

    def take(self, gauges: Gauges) -> SchedulerStats:
        """To be sent now."""
        self._sent_gauges = gauges
        stats, self.counters = self.counters, SchedulerStats()
        connector, self._connector = self._connector, None
        stats.num_running, stats.num_waiting, stats.kv_cache_usage = gauges
        stats.connector = None if connector is None else connector.data
        return stats
