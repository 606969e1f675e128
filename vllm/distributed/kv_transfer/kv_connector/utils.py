# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by connectors, workers and executors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.aggregator import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput

__all__ = [
    "KVOutputAggregator",
    "copy_kv_blocks",
    "get_kv_connector_cache_layout",
    "yield_req_data",
]


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
