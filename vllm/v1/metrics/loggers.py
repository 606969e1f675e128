# SPDX-License-Identifier: Apache-2.0
"""Where statistics go: the log, and Prometheus."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.engine import SchedulerStats
from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.metrics.merge import merged
from vllm.v1.metrics.stats import IterationStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.placements import MemorySize

logger = init_logger(__name__)


class StatLoggerBase(ABC):
    """A consumer of statistics."""

    @abstractmethod
    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats
    ) -> None:
        """Take one message's statistics."""

    def record_sleep(self, level: int) -> None:  # noqa: B027 - most loggers do not show it
        """The engine sleeps at `level`, 0 when it is awake."""

    def record_memory(self, size: MemorySize) -> None:  # noqa: B027 - most do not show it
        """State memory has been planned anew."""

    def log(self) -> None:  # noqa: B027 - most loggers have nothing to print
        """Print what was gathered since the last call."""


class LoggingStatLogger(StatLoggerBase):
    """One line of throughput every `VLLM_LOG_STATS_INTERVAL` seconds while there is traffic."""

    def __init__(self, engine_index: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine_index = engine_index
        self._clock = clock
        self._latest = SchedulerStats()
        self._reset()

    def _reset(self) -> None:
        self._since = self._clock()
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self._queries = self._hits = 0
        self._drafts = self._draft_tokens = 0
        #: by position in the draft
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats
    ) -> None:
        self._num_prompt_tokens += iteration_stats.num_prompt_tokens
        self._num_generation_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            self._latest = scheduler_stats
            self._queries += scheduler_stats.prefix_queries
            self._hits += scheduler_stats.prefix_hits
            self._drafts += scheduler_stats.num_drafts
            self._draft_tokens += scheduler_stats.num_draft_tokens
            self._drafted = _sums(self._drafted, scheduler_stats.drafted_per_position)
            self._accepted = _sums(self._accepted, scheduler_stats.accepted_per_position)
        if self.is_due():
            self.log()

    def is_due(self) -> bool:
        """Whether to print after what was just recorded."""
        return self._clock() - self._since >= envs.VLLM_LOG_STATS_INTERVAL

    def log(self) -> None:
        seconds = max(self._clock() - self._since, 1e-9)
        hit_rate = self._hits / self._queries if self._queries else 0.0
        logger.info(
            "Engine %03d: prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, "
            "running: %d reqs, waiting: %d reqs, KV cache usage: %.1f%%, prefix cache hit rate: "
            "%.1f%%",
            self._engine_index,
            self._num_prompt_tokens / seconds,
            self._num_generation_tokens / seconds,
            self._latest.num_running,
            self._latest.num_waiting,
            self._latest.kv_cache_usage * 100,
            hit_rate * 100,
        )
        if self._draft_tokens:
            self._log_speculation(seconds)
        self._reset()

    def _log_speculation(self, seconds: float) -> None:
        """Rates are of the steps that verified drafts, those of a position of the steps that
        verified so many; lengths count the token after them."""
        accepted = sum(self._accepted)
        rates = [
            count / max(drafted, 1)
            for count, drafted in zip(self._accepted, self._drafted, strict=True)
        ]
        logger.info(
            "SpecDecoding metrics: Mean acceptance length: %.2f, "
            "Accepted throughput: %.2f tokens/s, Drafted throughput: %.2f tokens/s, "
            "Accepted: %d tokens, Drafted: %d tokens, "
            "Per-position acceptance rate: %s, Avg Draft acceptance rate: %.1f%%",
            1 + accepted / self._drafts,
            accepted / seconds,
            self._draft_tokens / seconds,
            accepted,
            self._draft_tokens,
            ", ".join(f"{rate:.3f}" for rate in rates),
            100 * accepted / self._draft_tokens,
        )


def _sums(before: list[int], new: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(before, new, fillvalue=0)]


class PrometheusStatLogger(StatLoggerBase):
    """Feeds the metrics of one engine, which are in a `registry` of its own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_index: int,
        registry: CollectorRegistry,
    ) -> None:
        self._cache = vllm_config.cache_config
        self._metrics = EngineMetrics(vllm_config, registry, engine_index)

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats
    ) -> None:
        if scheduler_stats is not None:
            self._metrics.record_scheduler(scheduler_stats)
        self._metrics.record_iteration(iteration_stats)

    def record_sleep(self, level: int) -> None:
        self._metrics.record_sleep(level)

    def record_memory(self, size: MemorySize) -> None:
        cache = copy.copy(self._cache)
        cache.num_gpu_blocks, cache.capacity_tokens = size
        self._metrics.show_cache(cache)


class StatLoggerManager:
    """All consumers of one front end, for each replica of its engine.

    `configs`: of the replicas, which have started; `registry`: where their metrics are shown, told
    apart by the label `engine`. `shows_log`: whether to print throughput. `rank_of`: the replica
    where a request runs, if there are several.
    """

    def __init__(
        self,
        configs: Sequence[VllmConfig],
        registry: CollectorRegistry,
        shows_log: bool = True,
        rank_of: Callable[[str], int | None] | None = None,
    ) -> None:
        self._rank_of = rank_of
        registries = _registries_of_replicas(registry, len(configs))
        self._loggers: dict[int, list[StatLoggerBase]] = {}
        for config, own in zip(configs, registries, strict=True):
            rank = config.parallel_config.data_parallel_rank
            log: list[StatLoggerBase] = [LoggingStatLogger(rank)] if shows_log else []
            self._loggers[rank] = [*log, PrometheusStatLogger(config, rank, own)]

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats,
        engine_index: int | None = None,
    ) -> None:
        """Statistics of one message of a replica, by its rank; of none, the first counts them."""
        if engine_index is None:
            engine_index = next(iter(self._loggers))
        for stat_logger in self._loggers[engine_index]:
            stat_logger.record(scheduler_stats, iteration_stats)

    def record_aborted(self, request_ids: Sequence[str], ended: IterationStats) -> None:
        """Requests that the front end ends, before it tells the replicas where they run."""
        for request_id, finished in zip(request_ids, ended.finished, strict=True):
            rank = None if self._rank_of is None else self._rank_of(request_id)
            self.record(None, IterationStats(finished=[finished]), rank)

    def record_sleep(self, level: int) -> None:
        """All replicas sleep at `level`, 0 when they are awake."""
        for stat_logger in self._all():
            stat_logger.record_sleep(level)

    def record_memory(self, sizes: Sequence[MemorySize]) -> None:
        """Each replica has so much state memory from now on."""
        for loggers, size in zip(self._loggers.values(), sizes, strict=True):
            for stat_logger in loggers:
                stat_logger.record_memory(size)

    def log(self) -> None:
        """Print what was gathered since the last call."""
        for stat_logger in self._all():
            stat_logger.log()

    def _all(self) -> Iterator[StatLoggerBase]:
        return chain.from_iterable(self._loggers.values())


def _registries_of_replicas(registry: CollectorRegistry, count: int) -> list[CollectorRegistry]:
    """A registry for each replica, which `registry` shows together; itself for one."""
    if count == 1:
        return [registry]
    registries = [CollectorRegistry() for _ in range(count)]
    registry.register(_Together(registries))
    return registries


class _Together(Collector):
    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Each metric once, with the samples of all."""
        return iter(merged([list(registry.collect()) for registry in self._registries]))
