# SPDX-License-Identifier: Apache-2.0
"""Several replicas behind one front end: real processes, a model of no cost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tests.v1.engine.fakes import (
    BLOCK_SIZE,
    EOS,
    VOCAB_SIZE,
    FakeExecutor,
    expected_tokens,
    make_vllm_config,
)
from vllm.config import ParallelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils import start_method
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineSleepingError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]

#: of a step of the pair
STEP_S = 0.002


class ReplicaExecutor(FakeExecutor):
    """Says who it is, and sleeps, unless it was told that a replica cannot."""

    sleepless = -1
    num_awoken = 0

    def keep_awake(self, rank: int) -> None:
        self.sleepless = rank

    def whoami(self) -> tuple[int, int]:
        return self.vllm_config.parallel_config.data_parallel_rank, os.getpid()

    def sleep(self, level: int) -> int:
        if self.sleepless == self.vllm_config.parallel_config.data_parallel_rank:
            raise RuntimeError("no sleep tonight")
        return 0

    def wake_up(self, tags: Any) -> None:
        self.num_awoken += 1

    def times_awoken(self) -> int:
        return self.num_awoken


def config_of(size: int = 2, **options: Any) -> VllmConfig:
    config = make_vllm_config(async_scheduling=True, **options)
    config.parallel_config = ParallelConfig(data_parallel_size=size)
    assert config.model_config is not None
    config.model_config.enable_sleep_mode = True
    return config


class Pair:
    """Two replicas, on one event loop for all tests that share them."""

    def __init__(self, **options: Any) -> None:
        self.runner = asyncio.Runner()
        self.engine = AsyncLLM(config_of(2, **options), ReplicaExecutor, log_stats=True)

    def run(self, scenario: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
        self.runner.run(scenario(self.engine))

    def close(self) -> None:
        self.engine.shutdown()
        self.runner.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        patch.setattr(start_method, "_other_threads", list)
        made = Pair(additional_config={"step_s": STEP_S})
    yield made
    made.close()


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(20, VOCAB_SIZE), k=length)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.01)


async def collect(
    engine: AsyncLLM, name: str, prompt: Any, params: SamplingParams, rank: int | None = None
) -> list[RequestOutput]:
    stream = engine.generate(prompt, params, name, data_parallel_rank=rank)
    return [output async for output in stream]


def counted(engine: AsyncLLM | LLMEngine, name: str) -> dict[str, int]:
    """A counter's sum for each replica."""
    counts: dict[str, int] = {}
    for metric in engine.get_metrics():
        if isinstance(metric, Counter) and metric.name == name:
            rank = metric.labels["engine"]
            counts[rank] = counts.get(rank, 0) + metric.value
    return counts


def waiting(engine: AsyncLLM) -> dict[int, int]:
    router = engine.engine_core.router
    assert router is not None
    return router.waiting


def test_requests_spread_and_their_tokens_are_those_of_one_engine(pair: Pair) -> None:
    async def main(engine: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=20)
        prompts = [prompt_of(i, 20 + i) for i in range(24)]
        found = await asyncio.gather(
            *(collect(engine, f"r{i}", one, params) for i, one in enumerate(prompts))
        )
        for prompt, outputs in zip(prompts, found, strict=True):
            assert outputs[-1].outputs[0].token_ids == expected_tokens(prompt, params, eos=EOS)
        counts = counted(engine, "vllm:replica_requests")
        assert sum(counts.values()) == 24 and min(counts.values()) >= 8
        assert counted(engine, "vllm:request_success") == counts
        assert waiting(engine) == {0: 0, 1: 0}, "all that was counted has ended"

    pair.run(main)


def test_a_conversation_stays_where_its_state_is(pair: Pair) -> None:
    async def main(engine: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        homes: dict[int, list[int]] = {0: prompt_of(0, 64), 1: prompt_of(1, 64)}
        for rank, prompt in homes.items():
            await collect(engine, f"first{rank}", prompt, params, rank)
        for turn in range(3):
            for rank in (0, 1, 1, 0):
                homes[rank] = homes[rank] + prompt_of(10 * turn + rank, 20)
                prompt = {"prompt_token_ids": homes[rank], "return_cache_report": True}
                last = (await collect(engine, f"t{turn}{rank}", prompt, params))[-1]
                assert last.cache_report is not None
                assert last.cache_report.data_parallel_rank == rank
                assert last.cache_report.as_dict()["data_parallel_rank"] == rank
                assert last.num_cached_tokens and last.num_cached_tokens >= 64 - BLOCK_SIZE
        with pytest.raises(VLLMValidationError, match="0 to 1, got 2"):
            await collect(engine, "nowhere", homes[0], params, 2)
        chosen = [d for d in engine.vllm_config.decisions.decisions() if d.what == "replicas"]
        assert [one.chosen for one in chosen] == ["2"]

    pair.run(main)


def test_control_calls_reach_all_replicas(pair: Pair) -> None:
    async def main(engine: AsyncLLM) -> None:
        found = await engine.collective_rpc("whoami")
        assert [rank for rank, _ in found] == [0, 1] and len({pid for _, pid in found}) == 2
        text = engine.metrics_text().decode()
        for rank in (0, 1):
            assert f'vllm:num_requests_running{{engine="{rank}",' in text
            assert f'vllm:engine_sleep_state{{engine="{rank}",' in text
        assert text.count("# TYPE vllm:generation_tokens_total counter") == 1

        params = SamplingParams(max_tokens=400, ignore_eos=True)
        await engine.collective_rpc("pace", args=(0.1,))  # 40 seconds for what is to be aborted
        streams = [
            asyncio.create_task(collect(engine, f"r{i}", prompt_of(i, 40), params, i % 2))
            for i in range(4)
        ]
        await until(lambda: len(engine.unfinished_request_ids()) == 4)
        assert await engine.reset_prefix_cache() is False
        await engine.abort([f"r{i}" for i in range(4)])
        for outputs in await asyncio.gather(*streams):
            assert outputs[-1].outputs[0].finish_reason == "abort"
        await engine.engine_core.call_utility("check_health")  # the aborts have arrived
        await engine.collective_rpc("pace", args=(STEP_S,))
        assert waiting(engine) == {0: 0, 1: 0}
        assert await engine.reset_prefix_cache() is True

        await engine.sleep(1)
        with pytest.raises(EngineSleepingError):
            await collect(engine, "asleep", [1, 2], params)
        before = await engine.collective_rpc("times_awoken")
        await engine.wake_up()
        assert await engine.collective_rpc("times_awoken") == [n + 1 for n in before]
        short = SamplingParams(max_tokens=3, ignore_eos=True)
        for rank in (0, 1):
            await collect(engine, f"awake{rank}", [30, 31], short, rank)

    pair.run(main)


def test_all_sleep_or_none(pair: Pair) -> None:
    async def main(engine: AsyncLLM) -> None:
        before = await engine.collective_rpc("times_awoken")
        await engine.collective_rpc("keep_awake", args=(1,))
        with pytest.raises(Exception, match="replica 1: .*no sleep tonight"):
            await engine.sleep(1)
        assert not await engine.is_sleeping()
        assert await engine.collective_rpc("times_awoken") == [n + 1 for n in before]
        await engine.collective_rpc("keep_awake", args=(-1,))
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        for rank in (0, 1):
            await collect(engine, f"awake{rank}", [30, 31], params, rank)

    pair.run(main)


def test_aborted_requests_are_counted_where_they_ran(pair: Pair) -> None:
    """Whoever ends them: an abort of several at once, or a client that leaves."""

    async def main(engine: AsyncLLM) -> None:
        before = counted(engine, "vllm:request_success")
        params = SamplingParams(max_tokens=450, ignore_eos=True, n=2)
        ranks = (0, 1, 1, 1)
        streams = [
            engine.generate(prompt_of(i, 20), params, f"r{i}", data_parallel_rank=rank)
            for i, rank in enumerate(ranks)
        ]
        for stream in streams:
            await anext(stream)
        await streams[3].aclose()
        await engine.abort([f"r{i}" for i in range(3)])
        for stream in streams[:3]:
            assert [one.finished async for one in stream][-1]
        counts = counted(engine, "vllm:request_success")
        assert {rank: counts[rank] - before[rank] for rank in counts} == {"0": 2, "1": 6}

    pair.run(main)


def test_a_killed_replica_ends_the_engine_and_all_its_requests() -> None:
    async def main(engine: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=450, ignore_eos=True)
        streams = [
            asyncio.create_task(collect(engine, f"r{i}", prompt_of(i, 20), params, i % 2))
            for i in range(4)
        ]
        await until(lambda: len(engine.unfinished_request_ids()) == 4)
        pids = [pid for _, pid in await engine.collective_rpc("whoami")]
        os.kill(pids[1], signal.SIGKILL)
        for outcome in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(outcome, EngineDeadError) and "replica 1: " in str(outcome)
        with pytest.raises(EngineDeadError, match="replica 1"):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine, "later", [30], params)
        with pytest.raises(EngineDeadError):
            await engine.collective_rpc("whoami")
        living.append(pids[0])
        assert os.path.exists(f"/proc/{pids[0]}")

    doomed, living = Pair(additional_config={"step_s": 0.02}), []  # type: ignore[var-annotated]
    try:
        doomed.run(main)
    finally:
        doomed.close()
    assert not os.path.exists(f"/proc/{living[0]}")


def test_a_replica_that_cannot_start_ends_the_start() -> None:
    with pytest.raises(RuntimeError, match="no such weights"):
        AsyncLLM(config_of(2, additional_config={"fail_at_start": "no such weights"}), FakeExecutor)


def test_the_synchronous_engine() -> None:
    engine = LLMEngine(config_of(2), ReplicaExecutor, log_stats=True, multiprocess=True)
    try:
        params = SamplingParams(max_tokens=12)
        prompts = {f"r{i}": prompt_of(i, 30 + i) for i in range(9)}
        requests = [engine.prepare_request(n, p, params) for n, p in prompts.items()]
        engine.send_requests(requests)
        finished: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
        for name, prompt in prompts.items():
            assert finished[name] == expected_tokens(prompt, params, eos=EOS)
        assert [rank for rank, _ in engine.collective_rpc("whoami")] == [0, 1]
        finished_there = counted(engine, "vllm:request_success")
        engine.add_request("left", [30, 31], params, data_parallel_rank=1)
        engine.abort_request("left")
        finished_there["1"] += 1
        assert counted(engine, "vllm:request_success") == finished_there
        assert engine.reset_prefix_cache() is True
        engine.sleep(1)
        engine.wake_up()
        assert engine.collective_rpc("times_awoken") == [1, 1]
        assert engine.vllm_config.cache_config.num_gpu_blocks == 2 * 200
    finally:
        engine.shutdown()


def test_one_replica_of_several() -> None:
    """`--data-parallel-rank`: the others have servers of their own."""
    config = config_of(1)
    config.parallel_config = ParallelConfig(data_parallel_size=4, asked_data_parallel_rank=2)
    engine = LLMEngine(config, ReplicaExecutor, log_stats=True, multiprocess=False)
    try:
        prompt = {"prompt_token_ids": [30, 31], "return_cache_report": True}
        engine.add_request("a", prompt, SamplingParams(max_tokens=4), data_parallel_rank=2)
        reports = []
        while engine.has_unfinished_requests():
            reports += [output.cache_report for output in engine.step()]
        assert reports[-1] is not None and reports[-1].data_parallel_rank == 2
        assert [rank for rank, _ in engine.collective_rpc("whoami")] == [2]
        tokens = [
            (metric.labels["engine"], metric.value)
            for metric in engine.get_metrics()
            if isinstance(metric, Counter) and metric.name == "vllm:generation_tokens"
        ]
        assert tokens == [("2", 4)]
        with pytest.raises(VLLMValidationError, match="2 to 2"):
            engine.add_request("b", [30], SamplingParams(), data_parallel_rank=0)
    finally:
        engine.shutdown()


def test_replicas_need_processes() -> None:
    with pytest.raises(VLLMValidationError, match="VLLM_ENABLE_V1_MULTIPROCESSING"):
        LLMEngine(config_of(2), ReplicaExecutor, multiprocess=False)
