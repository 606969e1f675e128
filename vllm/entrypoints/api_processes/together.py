# SPDX-License-Identifier: Apache-2.0
"""What several API processes do as one server: metrics, aborts, sleep, placements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, Metric

from vllm.config import VllmConfig
from vllm.entrypoints.api_processes.control import ControlPort, PeerGoneError
from vllm.logger import init_logger
from vllm.v1.engine import SchedulerStats
from vllm.v1.engine.async_client import AsyncMPClient
from vllm.v1.engine.placements import MemorySize, PlacementChange, show_placement
from vllm.v1.engine.sleep import TAGS, SleepState
from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerManager
from vllm.v1.metrics.merge import as_text, merged, snapshot, total, without_gauges
from vllm.v1.metrics.prometheus import REGISTRY
from vllm.v1.metrics.stats import IterationStats

if TYPE_CHECKING:
    from vllm.model_executor.placements import Placement

logger = init_logger(__name__)

#: how long a process that does not answer holds up the metrics of the others
_ANSWER_S = 2.0

#: the open ports of all processes, by place
Ports = Callable[[], dict[int, ControlPort]]


class _ThroughputLog(LoggingStatLogger):
    """Prints when it is told to: the tokens are known by then only."""

    def is_due(self) -> bool:
        return False


class JointMetrics:
    """The metrics of the engine and of all API processes, and those that are gone."""

    def __init__(self, configs: Sequence[VllmConfig], ports: Ports, log_stats: bool) -> None:
        self._ports = ports
        self._registry = CollectorRegistry()
        self._log = _ThroughputLog() if log_stats else None
        self._engine: StatLoggerManager | None = None
        if log_stats:
            self._engine = StatLoggerManager(configs, self._registry, shows_log=False)
        #: the newest statistics of each replica
        self._gauges: dict[int, SchedulerStats] = {}
        self._latest: dict[int, Sequence[Metric]] = {}
        self._gone: list[Metric] = []
        self._logged = (0.0, 0.0)

    def record(self, stats: SchedulerStats | None, engine_index: int) -> None:
        """One core's statistics of one step."""
        if self._engine is not None and self._log is not None:
            self._engine.record(stats, IterationStats(), engine_index)
            if stats is not None:
                self._log.record(self._of_all(stats, engine_index), IterationStats())

    def _of_all(self, stats: SchedulerStats, engine_index: int) -> SchedulerStats:
        """`stats` with the gauges of all replicas together."""
        self._gauges[engine_index] = stats
        latest = self._gauges.values()
        return msgspec.structs.replace(
            stats,
            num_running=sum(one.num_running for one in latest),
            num_waiting=sum(one.num_waiting for one in latest),
            kv_cache_usage=sum(one.kv_cache_usage for one in latest) / len(latest),
        )

    def record_sleep(self, level: int) -> None:
        """The core sleeps at `level`, 0 when it is awake."""
        if self._engine is not None:
            self._engine.record_sleep(level)

    def record_memory(self, sizes: Sequence[MemorySize]) -> None:
        """Each replica has so much state memory from now on."""
        if self._engine is not None:
            self._engine.record_memory(sizes)

    def lose(self, place: int) -> None:
        """The process is gone: what it has counted still counts."""
        last = self._latest.pop(place, ())
        self._gone = without_gauges(merged([self._gone, without_gauges(last)]))

    async def text(self) -> bytes:
        """As `/metrics` shows them."""
        metrics = await self._collect()
        return await asyncio.to_thread(as_text, metrics)

    async def log(self) -> None:
        """Print throughput since the last call, if there was any."""
        if self._log is None:
            return
        metrics = await self._collect()
        now = (total(metrics, "vllm:prompt_tokens_total"), total(metrics, _GENERATED))
        prompt, generated = (int(a - b) for a, b in zip(now, self._logged, strict=True))
        self._logged = now
        counted = IterationStats(num_prompt_tokens=prompt, num_generation_tokens=generated)
        self._log.record(None, counted)
        if prompt or generated:
            self._log.log()

    async def _collect(self) -> list[Metric]:
        ports = self._ports()
        answers = await asyncio.gather(
            *(asyncio.wait_for(port.call("metrics"), _ANSWER_S) for port in ports.values()),
            return_exceptions=True,
        )
        for place, answer in zip(ports, answers, strict=True):
            if isinstance(answer, list):
                self._latest[place] = answer
        own = snapshot([REGISTRY, self._registry])
        known = [*self._latest.values()]
        return await asyncio.to_thread(merged, [own, *known, self._gone])


_GENERATED = "vllm:generation_tokens_total"


class JointSleep:
    """Puts the core to sleep when no process has a request left."""

    def __init__(self, core: AsyncMPClient, ports: Ports, metrics: JointMetrics) -> None:
        self._core = core
        self._ports = ports
        self._metrics = metrics
        self._lock = asyncio.Lock()
        #: of the core
        self.state = SleepState()

    async def sleep(self, level: int, mode: str) -> None:
        """See `AsyncLLM.sleep`."""
        async with self._lock:
            try:
                await tell_all(self._ports(), "rest", mode)
                await self._core.call_utility("sleep", level)
            except BaseException:
                await tell_all(self._ports(), "go_on")
                raise
            self.state = SleepState(level, frozenset(TAGS))
            self._metrics.record_sleep(level)
            await tell_all(self._ports(), "slept", level)

    async def wake_up(self, tags: Iterable[str]) -> None:
        """See `AsyncLLM.wake_up`."""
        chosen = tuple(tags)
        await tell_all(self._ports(), "call_off")
        async with self._lock:
            await self._core.call_utility("wake_up", chosen)
            self.state = replace(self.state, asleep=self.state.asleep.difference(chosen))
            if not self.state.asleep:
                self._metrics.record_sleep(0)
            await tell_all(self._ports(), "woke_up", chosen)


class JointPlacement:
    """Changes the placement of requests that do not choose one, and all processes show it."""

    def __init__(
        self, core: AsyncMPClient, ports: Ports, metrics: JointMetrics, vllm_config: VllmConfig
    ) -> None:
        self._core = core
        self._ports = ports
        self._metrics = metrics
        self._vllm_config = vllm_config
        self._lock = asyncio.Lock()
        #: the last change
        self.placed: tuple[Placement, PlacementChange] | None = None

    async def overlap(self, placement: Placement) -> None:
        """See `AsyncLLM.change_placement`."""
        async with self._lock:
            change = await self._core.call_utility("overlap_placement", placement)
            show_placement(self._vllm_config, placement, change)
            self._metrics.record_memory(change.memory)
            self.placed = placement, change
            await tell_all(self._ports(), "placed", placement, change)


async def tell_all(ports: dict[int, ControlPort], name: str, *args: Any) -> None:
    """Call all processes at once and wait for all; the first error is raised. Those that end
    meanwhile have nothing to do any more."""
    answers = await asyncio.gather(
        *(port.call(name, *args) for port in ports.values()), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, PeerGoneError):
            raise answer
