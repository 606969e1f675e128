# SPDX-License-Identifier: Apache-2.0
"""Counters of the offloading connector, and how `/metrics` shows them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    CounterPromMetrics,
    CounterStats,
    KVConnectorStats,
)

#: key of the statistics -> metric without `vllm:`, its help
COUNTERS = {
    "store_bytes": ("kv_offload_store_bytes", "Bytes copied from the device to host memory."),
    "store_blocks": ("kv_offload_store_blocks", "Blocks copied from the device to host memory."),
    "store_seconds": ("kv_offload_store_time", "Seconds from a store's start to its seal."),
    "load_bytes": ("kv_offload_load_bytes", "Bytes copied from host memory to the device."),
    "load_blocks": ("kv_offload_load_blocks", "Blocks copied from host memory to the device."),
    "load_seconds": ("kv_offload_load_time", "Seconds from a load's start to its end."),
    "seal_bytes": ("kv_offload_seal_bytes", "Bytes of which a digest was made or checked."),
    "seal_seconds": ("kv_offload_seal_time", "Thread seconds spent on digests."),
    "file_write_bytes": ("kv_offload_file_write_bytes", "Bytes written to files."),
    "file_read_bytes": ("kv_offload_file_read_bytes", "Bytes read from files."),
    "broken_blocks": (
        "kv_offload_broken_blocks",
        "Blocks not loaded: digest mismatch, missing or short data.",
    ),
    "file_write_failures": ("kv_offload_file_write_failures", "Blocks that no file could take."),
    "skipped_blocks": (
        "kv_offload_allocation_failure",
        "Blocks overwritten on the device before host memory had room for them.",
    ),
    "query_tokens": ("kv_offload_query_tokens", "Tokens of requests that were looked up."),
    "hit_tokens": ("kv_offload_hit_tokens", "Tokens of them loaded from host memory or files."),
    "promoted_blocks": ("kv_offload_promoted_blocks", "Blocks read from files for requests."),
}
GAUGES = {
    "host_bytes": ("kv_offload_host_capacity_bytes", "Host memory of the tier, of one rank."),
    "host_used_bytes": ("kv_offload_host_used_bytes", "Bytes of it in use."),
    "file_bytes": ("kv_offload_file_capacity_bytes", "Bytes that files may take, of one rank."),
    "file_used_bytes": ("kv_offload_file_used_bytes", "Bytes of files."),
}


class OffloadingStats(CounterStats):
    """Counts since the last report; gauges as last seen."""

    def aggregate(self, other: KVConnectorStats) -> OffloadingStats:
        self.add(**{key: value for key, value in other.data.items() if key in COUNTERS})
        self.data.update({key: value for key, value in other.data.items() if key in GAUGES})
        return self


class OffloadingPromMetrics(CounterPromMetrics):
    """One Prometheus metric per key."""

    counters = COUNTERS

    def make_metrics(self, labelnames: list[str]) -> None:
        super().make_metrics(labelnames)
        self._gauges = {
            key: self._gauge_cls(f"vllm:{name}", text, labelnames, multiprocess_mode="mostrecent")
            for key, (name, text) in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        counts = {key: value for key, value in transfer_stats_data.items() if key in COUNTERS}
        super().observe(counts, engine_idx)
        values = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            if key in self._gauges:
                self._gauges[key].labels(*values).set(value)
