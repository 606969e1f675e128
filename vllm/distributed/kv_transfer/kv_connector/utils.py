# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by connectors, workers and executors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from typing_extensions import Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import RequestError
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


class _Countdown:
    """Ids that count as finished once enough workers have reported them."""

    def __init__(self) -> None:
        self._missing: dict[str, int] = {}

    def report(self, req_ids: set[str] | None, expected: int) -> set[str]:
        """Register one worker's report; returns the ids that are complete with it."""
        complete = set()
        for req_id in req_ids or ():
            missing = self._missing.get(req_id, expected) - 1
            if missing > 0:
                self._missing[req_id] = missing
            else:
                self._missing.pop(req_id, None)
                complete.add(req_id)
        return complete


class KVOutputAggregator:
    """An id is finished when `expected_finished_count` workers have reported it."""

    def __init__(self, expected_finished_count: int) -> None:
        if expected_finished_count < 1:
            raise ValueError(f"expected_finished_count {expected_finished_count} is below 1")
        self._expected = expected_finished_count
        self._sending = _Countdown()
        self._recving = _Countdown()

    @classmethod
    def from_connector(cls, connector: KVConnectorBase_V1, world_size: int) -> Self:
        return cls(connector.get_finished_count() or world_size)

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The output of `output_rank`, carrying the merged reports and failures of all ranks."""
        output = outputs[output_rank]
        if output is None:
            return None
        present = [o for o in outputs if o is not None]
        reports = [o.kv_connector_output for o in present if o.kv_connector_output is not None]
        failed: dict[str, RequestError] = {}
        for other in present:
            failed = {**other.failed_req_ids, **failed}
        merged = self._merge(reports) if reports else None
        return replace(output, kv_connector_output=merged, failed_req_ids=failed)

    def _merge(self, reports: list[KVConnectorOutput]) -> KVConnectorOutput:
        merged = KVConnectorOutput()
        sending: set[str] = set()
        recving: set[str] = set()
        for report in reports:
            # A connector may change its mind while running (peers of another size joined).
            self._expected = report.expected_finished_count or self._expected
            sending |= self._sending.report(report.finished_sending, self._expected)
            recving |= self._recving.report(report.finished_recving, self._expected)
            merged.invalid_blocks |= report.invalid_blocks
            merged.invalid_block_ids |= report.invalid_block_ids
            merged.kv_connector_stats = joined(merged.kv_connector_stats, report.kv_connector_stats)
            merged.kv_cache_events = joined(merged.kv_cache_events, report.kv_cache_events)
            merged.kv_connector_worker_meta = joined(
                merged.kv_connector_worker_meta, report.kv_connector_worker_meta
            )
        merged.finished_sending = sending or None
        merged.finished_recving = recving or None
        merged.expected_finished_count = self._expected
        return merged


def joined(first: Any | None, second: Any | None) -> Any | None:
    """Statistics, events and worker messages all merge by their own `aggregate`."""
    if first is None or second is None:
        return second if first is None else first
    return first.aggregate(second)


def get_kv_connector_cache_layout() -> str:
    """The layout the configured connector demands, `"NHD"` when it demands none."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    vllm_config = get_current_vllm_config()
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance:
        return "NHD"
    connector_cls = KVConnectorFactory.get_connector_class(transfer)
    return connector_cls.get_required_kvcache_layout(vllm_config) or "NHD"


def copy_kv_blocks(
    src_kv_caches: dict[str, Tensor],
    dst_kv_caches: dict[str, Tensor],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: Literal["h2d", "d2h"],
) -> None:
    """Copy blocks of every layer, `[num_blocks, ...]` each, between a device and a host buffer."""
    if len(src_block_ids) != len(dst_block_ids):
        raise ValueError(
            f"{len(src_block_ids)} source blocks for {len(dst_block_ids)} target blocks"
        )
    host = src_kv_caches if direction == "h2d" else dst_kv_caches
    if any(cache.device.type != "cpu" for cache in host.values()):
        raise ValueError(f"direction {direction!r}, but the host side is not in host memory")
    for name, src in src_kv_caches.items():
        dst = dst_kv_caches[name]
        for src_block, dst_block in zip(src_block_ids, dst_block_ids, strict=True):
            dst[dst_block].copy_(src[src_block], non_blocking=True)


def yield_req_data(
    scheduler_output: SchedulerOutput,
) -> Iterator[tuple[str, tuple[list[int], ...] | None, bool]]:
    """`(request id, new block ids per group, replaces all earlier ones)` of a step's requests."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, False
    cached = scheduler_output.scheduled_cached_reqs
    for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield req_id, block_ids, req_id in cached.resumed_req_ids
