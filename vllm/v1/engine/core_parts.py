# SPDX-License-Identifier: Apache-2.0
"""What an engine core is made of, as its configuration says: scheduler, hashes and event stream."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory
from vllm.utils.class_registry import resolve_class
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHasher, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_placements import tell_weights_read
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig


def create_scheduler(
    vllm_config: VllmConfig, executor: Executor, kv_cache_config: KVCacheConfig, log_stats: bool
) -> SchedulerInterface:
    """The scheduler, with what it has to know of the workers. ValueError for one that schedules
    fewer steps at a time than the executor keeps in flight."""
    config = vllm_config.scheduler_config
    scheduler_class: type[SchedulerInterface]
    if config.scheduler_cls is not None:
        scheduler_class = resolve_class(config.scheduler_cls)
    else:
        scheduler_class = AsyncScheduler if config.async_scheduling else Scheduler
    scheduler = scheduler_class(vllm_config, kv_cache_config, log_stats)
    if scheduler.max_steps_in_flight < executor.max_concurrent_batches:
        raise ValueError(
            f"{scheduler_class.__name__} schedules {scheduler.max_steps_in_flight} step at a "
            "time, but asynchronous scheduling and pipeline stages keep "
            f"{executor.max_concurrent_batches} in flight; use --no-async-scheduling and "
            "--pipeline-parallel-size 1"
        )
    tell_weights_read(vllm_config, scheduler, executor)
    if (connector := scheduler.get_kv_connector()) is not None:
        executor.init_kv_output_aggregator(connector)
        found = executor.collective_rpc("get_kv_connector_handshake_metadata")
        if told := {ranks: metadata for ranks, metadata in found if metadata is not None}:
            connector.set_xfer_handshake_metadata_pp_aware(told)
    return scheduler


def create_event_publisher(vllm_config: VllmConfig) -> EventPublisher | None:
    """None unless cache events are asked for."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    rank = vllm_config.parallel_config.data_parallel_rank
    return EventPublisherFactory.create(config, rank)


def create_block_hasher(
    vllm_config: VllmConfig, scheduler: SchedulerInterface
) -> BlockHasher | None:
    """None without a prefix cache and a connector, which alone look blocks up by their hashes."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching and vllm_config.kv_transfer_config is None:
        return None
    hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    connector = scheduler.get_kv_connector()
    root = None if connector is None else connector.get_prefix_hash_root()
    init_none_hash(hash_function, root)
    return get_request_block_hasher(cache.block_size, hash_function)
