# SPDX-License-Identifier: Apache-2.0
"""Driving a scheduler with the fake worker."""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.v1.engine.fakes import EOS, FakeExecutor, FakeWorker, make_vllm_config
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

init_none_hash(sha256)


def make_kv_cache_config(config: VllmConfig) -> KVCacheConfig:
    executor = FakeExecutor(config)
    specs, memory = executor.get_kv_cache_specs(), executor.determine_available_memory()
    executor.shutdown()
    return get_kv_cache_configs(config, specs, memory)[0]


def make_scheduler(kv_cache_config: KVCacheConfig | None = None, **options: Any) -> Scheduler:
    config = make_vllm_config(**options)
    kv_cache_config = kv_cache_config or make_kv_cache_config(config)
    scheduler_class = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return scheduler_class(config, kv_cache_config)


def make_request(
    request_id: str, prompt: list[int], priority: int = 0, arrival: float = 0.0, **params: Any
) -> Request:
    params.setdefault("max_tokens", 8)
    sampling_params = SamplingParams(**params)
    return Request(
        request_id,
        prompt,
        sampling_params,
        eos_token_id=EOS,
        priority=priority,
        arrival_time=arrival,
        block_hasher=get_request_block_hasher(16, sha256),
    )


class Driver:
    """Steps a scheduler; keeps up to `scheduler.max_steps_in_flight` steps in flight."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.worker = FakeWorker()
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, EngineCoreOutput] = {}
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def launch(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.in_flight.append((output, self.worker.execute(output)))
        return output

    def collect(self) -> list[EngineCoreOutput]:
        output, result = self.in_flight.popleft()
        received: list[EngineCoreOutput] = []
        for outputs in self.scheduler.update_from_output(output, result).values():
            received += outputs.outputs
        for item in received:
            assert item.request_id not in self.finished, "output after the last one"
            self.tokens.setdefault(item.request_id, []).extend(item.new_token_ids)
            if item.finish_reason is not None and not item.awaits_stop:
                self.finished[item.request_id] = item
        return received

    def step(self) -> SchedulerOutput:
        output = self.launch()
        if len(self.in_flight) >= self.scheduler.max_steps_in_flight:
            self.collect()
        return output

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if len(self.in_flight) >= self.scheduler.max_steps_in_flight:
                self.collect()
            elif self.scheduler.has_requests():
                self.launch()
            elif self.in_flight:
                self.collect()
            else:
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def reason(self, request_id: str) -> FinishReason | None:
        return self.finished[request_id].finish_reason
