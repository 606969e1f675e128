# SPDX-License-Identifier: Apache-2.0
"""The replicas of a data-parallel engine: the configuration of each, and one answer to a call that
all of them got."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm import decisions
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.placements import MemorySize, PlacementChange
from vllm.v1.engine.sleep import TAGS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: a replica's rank, and all of its decisions
Decided = tuple[int, list[decisions.Decision]]
#: calls after which no replica has the prefixes that it had
_FORGETTING = frozenset({"reset_prefix_cache", "sleep", "change_placement"})
#: call -> what takes it back, with its arguments, where some replicas could and others could not
_UNDO: dict[str, tuple[Any, ...]] = {
    "sleep": ("wake_up", TAGS),
    "change_placement": ("take_back_placement",),
}


def combined(method: str, ranks: Sequence[int], answers: Sequence[Any]) -> Any:
    """Of results or exceptions in rank order: all results of a worker call, whether all could, or
    what all say alike. Raises the replicas' error if there is any."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors:
        raise _joint_error(method, ranks, answers, errors)
    return _COMBINE.get(method, _first)(answers)


def undo(method: str, answers: Sequence[Any]) -> tuple[list[int], tuple[Any, ...]]:
    """Which replicas, by their places in `answers`, have to be told what so that all are in one
    state again; none if all could, or none."""
    call = _UNDO.get(method)
    succeeded = [i for i, one in enumerate(answers) if not isinstance(one, BaseException)]
    if call is None or len(succeeded) == len(answers):
        return [], ()
    return succeeded, call


def forgets_prefixes(method: str, args: tuple[Any, ...]) -> bool:
    """Whether caches are empty after the call."""
    return method in _FORGETTING or (method == "collective_rpc" and args[0] == "reload_weights")


def _joint_error(
    method: str, ranks: Sequence[int], answers: Sequence[Any], errors: list[BaseException]
) -> BaseException:
    dead = next((error for error in errors if isinstance(error, EngineDeadError)), None)
    if dead is not None:
        return dead
    if len(errors) == len(answers):
        return errors[0]
    failed = [
        f"replica {rank}: {answer}"
        for rank, answer in zip(ranks, answers, strict=True)
        if isinstance(answer, BaseException)
    ]
    others = "" if method in _UNDO else "; the others have done it"
    return EngineGenerateError(f"{method} failed on {', '.join(failed)}{others}")


def _first(answers: Sequence[Any]) -> Any:
    return answers[0]


def _joined(answers: Sequence[Any]) -> list[Any]:
    return list(chain.from_iterable(answers))


def _placement_change(answers: Sequence[PlacementChange]) -> PlacementChange:
    return PlacementChange(
        any(one.is_busy for one in answers),
        _joined([one.placements for one in answers]),
        _joined([one.memory for one in answers]),
    )


_COMBINE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "collective_rpc": _joined,
    "decisions": _joined,
    "reset_prefix_cache": all,
    "change_placement": _placement_change,
}


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
    caches = [one.cache_config for one in started]
    sizes = [MemorySize(one.num_gpu_blocks, one.capacity_tokens) for one in caches]
    cache.num_gpu_blocks, cache.capacity_tokens = MemorySize.of_all(sizes)
    length = min(one.model_config.max_model_len for one in started)
    config.model_config.max_model_len = config.scheduler_config.max_model_len = length
    adopt_decisions(config, [decided(one) for one in started])


def decided(config: VllmConfig) -> Decided:
    """What a replica has decided so far."""
    return config.parallel_config.data_parallel_rank, config.decisions.decisions()


def adopt_decisions(config: VllmConfig, found: Sequence[Decided]) -> None:
    """Add what the replicas have decided; where they differ, they are told apart."""
    common = {decision.what: decision for decision in found[0][1]}
    config.decisions.adopt(list(common.values()))
    for rank, others in found[1:]:
        config.decisions.adopt(
            [
                decisions.Decision(f"{one.what} of replica {rank}", one.chosen, one.why)
                for one in others
                if common.get(one.what) != one
            ]
        )
