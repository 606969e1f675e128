# SPDX-License-Identifier: Apache-2.0
"""Counters of state transfer between engines, and how `/metrics` shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: key of the statistics -> metric without `vllm:`, its help
COUNTERS = {
    "sent_requests": ("kv_p2p_sent_requests", "Requests whose state was made ready for a peer."),
    "sent_bytes": ("kv_p2p_sent_bytes", "Bytes made ready for peers."),
    "failed_sends": ("kv_p2p_failed_sends", "Requests whose state could not be made ready."),
    "expired_leases": ("kv_p2p_expired_leases", "Requests whose state nobody fetched in time."),
    "received_requests": ("kv_p2p_received_requests", "Requests whose state was fetched."),
    "received_bytes": ("kv_p2p_received_bytes", "Bytes fetched from peers."),
    "receive_seconds": ("kv_p2p_receive_time", "Seconds from asking for state to having it."),
    "failed_receives": ("kv_p2p_failed_receives", "Requests whose state could not be fetched."),
}


class P2pStats(KVConnectorStats):
    """Counts since the last report."""

    def reset(self) -> None:
        self.data = {}

    def add(self, **counts: float) -> None:
        for key, count in counts.items():
            self.data[key] = self.data.get(key, 0) + count

    def aggregate(self, other: KVConnectorStats) -> P2pStats:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class P2pPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per key."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            key: self._counter_cls(f"vllm:{name}", text, labelnames)
            for key, (name, text) in COUNTERS.items()
        }
        for values in per_engine_labelvalues.values():
            for metric in self._counters.values():
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            self._counters[key].labels(*values).inc(value)
