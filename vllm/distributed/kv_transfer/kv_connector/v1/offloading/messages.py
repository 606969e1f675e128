# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the offloading connector tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


class StoredBlock(NamedTuple):
    """A block on its way from the device to a slot of host memory, and to the file `name` unless
    that is None."""

    group: int
    device_block: int
    host_block: int
    name: str | None


class LoadedBlock(NamedTuple):
    """A block on its way to the device from a slot of host memory; the slot is filled from the file
    `name` first unless that is None."""

    group: int
    device_block: int
    host_block: int
    name: str | None


@dataclass(frozen=True)
class StoreJob:
    """Blocks that leave in one step."""

    job_id: int
    blocks: list[StoredBlock]


@dataclass(frozen=True)
class LoadJob:
    """Blocks that a waiting request needs."""

    req_id: str
    blocks: list[LoadedBlock]


@dataclass
class OffloadingMetadata(KVConnectorMetadata):
    """A step's transfers.

    `overwrites`: this step may overwrite device blocks that are still being copied out. `deletes`:
    group and name of files to remove. `counts`: what the scheduler's side counted since the last
    step; `gauges`: what is held now.
    """

    stores: StoreJob | None = None
    loads: list[LoadJob] = field(default_factory=list)
    overwrites: bool = False
    deletes: list[tuple[int, str]] = field(default_factory=list)
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
