# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the offloading connector tell each other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    CounterPromMetrics,
    CounterStats,
    KVConnectorStats,
)


class MovedBlock(NamedTuple):
    """A block on its way between the device and a slot of host memory. `name`: the file that the
    slot is written to after a store, or filled from before a load; None for no file."""

    group: int
    device_block: int
    host_block: int
    name: str | None


@dataclass(frozen=True)
class StoreJob:
    """Blocks that leave in one step."""

    job_id: int
    blocks: list[MovedBlock]


@dataclass(frozen=True)
class LoadJob:
    """Blocks that a waiting request needs."""

    req_id: str
    blocks: list[MovedBlock]


@dataclass
class OffloadingMetadata(KVConnectorMetadata):
    """A step's transfers.

    `overwrites`: this step may overwrite device blocks that are still being copied out. `deletes`:
    names of files to remove. `counts`: what the scheduler's side counted since the last
    step; `gauges`: what is held now.
    """

    stores: StoreJob | None = None
    loads: list[LoadJob] = field(default_factory=list)
    overwrites: bool = False
    deletes: list[str] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class JobReport:
    """How many ranks are done with a job, and which of its blocks failed on any of them."""

    num_ranks: int
    failed: frozenset[int] = frozenset()

    def joined(self, other: JobReport) -> JobReport:
        return JobReport(self.num_ranks + other.num_ranks, self.failed | other.failed)


@dataclass
class OffloadingWorkerMetadata(KVConnectorWorkerMetadata):
    """`copied`, `written`: reports of store jobs, in host memory and in files. `broken`: `(group,
    host block)` of loads whose content was not what had been sealed."""

    copied: dict[int, JobReport] = field(default_factory=dict)
    written: dict[int, JobReport] = field(default_factory=dict)
    broken: set[tuple[int, int]] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadingWorkerMetadata:
        assert isinstance(other, OffloadingWorkerMetadata)
        return OffloadingWorkerMetadata(
            _joined(self.copied, other.copied),
            _joined(self.written, other.written),
            self.broken | other.broken,
        )


def _joined(one: dict[int, JobReport], other: dict[int, JobReport]) -> dict[int, JobReport]:
    joined = dict(one)
    for job_id, report in other.items():
        joined[job_id] = joined[job_id].joined(report) if job_id in joined else report
    return joined


#: key of the statistics -> metric without `vllm:`, its help
COUNTERS = {
    "store_bytes": ("kv_offload_store_bytes", "Bytes copied from the device to host memory."),
    "store_blocks": ("kv_offload_store_blocks", "Blocks copied from the device to host memory."),
    "store_seconds": ("kv_offload_store_time", "Seconds from a store's start to its seal."),
    "load_bytes": ("kv_offload_load_bytes", "Bytes copied from host memory to the device."),
    "load_blocks": ("kv_offload_load_blocks", "Blocks copied from host memory to the device."),
    "load_seconds": ("kv_offload_load_time", "Seconds from a load's start to its end."),
    "seal_bytes": ("kv_offload_seal_bytes", "Bytes of which a digest was made or checked."),
    "seal_seconds": (
        "kv_offload_seal_time",
        "Seconds of threads or of the device spent on digests.",
    ),
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
    """One Prometheus metric per key. A gauge is the sum over the connectors of an engine, which
    share it: bytes add up as counts do."""

    counters = COUNTERS

    def make_metrics(self, labelnames: list[str]) -> None:
        super().make_metrics(labelnames)
        self._gauges = {
            key: self._gauge_cls(f"vllm:{name}", text, labelnames, multiprocess_mode="livesum")
            for key, (name, text) in GAUGES.items()
        }
        for values in self.per_engine_labelvalues.values():
            for gauge in self._gauges.values():
                gauge.labels(*values).set(0)  # a file may have it from before a restart
        #: this connector's part of each gauge, by engine
        self._parts: defaultdict[tuple[int, str], float] = defaultdict(float)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        counts = {key: value for key, value in transfer_stats_data.items() if key in COUNTERS}
        super().observe(counts, engine_idx)
        values = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            if key in self._gauges:
                before, self._parts[engine_idx, key] = self._parts[engine_idx, key], value
                self._gauges[key].labels(*values).inc(value - before)
