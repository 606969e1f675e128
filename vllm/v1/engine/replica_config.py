# SPDX-License-Identifier: Apache-2.0
"""The configuration of each replica of a data-parallel engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm import decisions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def replica_configs(config: VllmConfig) -> list[VllmConfig]:
    """One for each replica that this server runs, in the order of their ranks; `config` itself
    without data parallelism. The parts that a start fills in are each one's own."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return [config]
    return [_replica_config(config, rank) for rank in parallel.local_ranks]


def _replica_config(config: VllmConfig, rank: int) -> VllmConfig:
    own = copy.copy(config)
    own.parallel_config = copy.copy(config.parallel_config)
    own.parallel_config.data_parallel_rank = own.parallel_config.data_parallel_index = rank
    own.model_config = copy.copy(config.model_config)
    own.cache_config = copy.copy(config.cache_config)
    own.scheduler_config = copy.copy(config.scheduler_config)
    if config.kv_transfer_config is not None:
        own.kv_transfer_config = copy.copy(config.kv_transfer_config)
        own.kv_transfer_config.engine_id += f"_dp{rank}"
    own.decisions = decisions.DecisionLog()
    own.decisions.adopt(config.decisions.decisions())
    return own


def device_environment(config: VllmConfig, index: int) -> dict[str, str]:
    """Variables of the process of this server's `index`-th replica, which sees only the devices of
    its own workers. `VLLMValidationError` where there are too few."""
    from vllm.platforms import current_platform

    count = config.parallel_config.local_world_size
    return current_platform.environment_of_devices(index * count, count)


def adopt_starts(config: VllmConfig, started: Sequence[VllmConfig]) -> None:
    """Fill in what the replicas' starts have decided: together they hold as much as all of them, a
    request is no longer than the least one takes, and decisions that differ are told apart."""
    first = started[0]
    if first is config:
        return
    cache = config.cache_config
    cache.num_gpu_blocks = _total([one.cache_config.num_gpu_blocks for one in started])
    cache.capacity_tokens = _total([one.cache_config.capacity_tokens for one in started])
    length = min(one.model_config.max_model_len for one in started)
    config.model_config.max_model_len = config.scheduler_config.max_model_len = length
    common = {decision.what: decision for decision in first.decisions.decisions()}
    config.decisions.adopt(list(common.values()))
    for other in started[1:]:
        rank = other.parallel_config.data_parallel_rank
        config.decisions.adopt(
            [
                decisions.Decision(f"{one.what} of replica {rank}", one.chosen, one.why)
                for one in other.decisions.decisions()
                if common.get(one.what) != one
            ]
        )


def _total(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
