# SPDX-License-Identifier: Apache-2.0
"""Sleep mode: what it releases, what it brings back, and what happens to requests meanwhile."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import psutil
import pytest
from torch import Tensor

from tests.tiny_models import tiny_model
from tests.v1.engine.fakes import FakeExecutor, expected_tokens, make_vllm_config
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason, StopRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineSleepingError
from vllm.v1.worker.sleep import ParkedMemory

pytestmark = pytest.mark.slow

ARENA_BYTES = 192 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4] * 20, [9, 8, 7]]


@pytest.fixture
def llm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made = LLM(
        str(tiny_model(request.param)),
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=ARENA_BYTES,
        enable_sleep_mode=True,
    )
    yield made
    made.shutdown()


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def arena_bytes(worker: Any) -> int:
    return worker.model_runner.arena.buffer.untyped_storage().nbytes()


def weight_bytes(worker: Any) -> int:
    return sum(p.untyped_storage().nbytes() for p in worker.get_model().parameters())


def write_arena(worker: Any, byte: int) -> None:
    worker.model_runner.arena.buffer.fill_(byte)


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("llm", ["llama", "qwen3_5_tied"], indirect=True)
def test_memory_goes_and_comes_back(llm: LLM, level: int) -> None:
    expected = tokens_of(llm)
    llm.collective_rpc(write_arena, args=(0xFF,))  # NaN everywhere, and every page resident
    arena, weights = llm.collective_rpc(arena_bytes)[0], llm.collective_rpc(weight_bytes)[0]
    before = resident()
    llm.sleep(level)
    assert llm.is_sleeping()
    assert llm.collective_rpc(arena_bytes) == [0]
    assert llm.collective_rpc(weight_bytes) == [weights if level == 1 else 0]
    assert before - resident() > 0.9 * ARENA_BYTES
    llm.wake_up()
    assert not llm.is_sleeping()
    assert llm.collective_rpc(arena_bytes) == [arena]
    assert llm.collective_rpc(weight_bytes) == [weights]
    assert tokens_of(llm) == expected


@pytest.mark.parametrize("llm", ["llama"], indirect=True)
def test_requests_are_refused_until_everything_is_awake(llm: LLM) -> None:
    expected = tokens_of(llm)
    llm.sleep(2)
    llm.sleep(2)
    with pytest.raises(VLLMValidationError, match="the weights sleep; wake them up first"):
        llm.collective_rpc("reload_weights")
    with pytest.raises(VLLMValidationError, match="sleeps at level 2"):
        llm.sleep(1)
    for tags in (["weights"], []):
        with pytest.raises(EngineSleepingError, match="wake it up first"):
            llm.generate(PROMPTS, GREEDY)
        llm.wake_up(tags)
        assert llm.is_sleeping()
        with pytest.raises(VLLMValidationError, match=r"level 2 \(kv_cache\); wake it up first"):
            llm.sleep(2)
    with pytest.raises(VLLMValidationError, match=r"unknown wake-up tags \['kv'\]"):
        llm.wake_up(["kv"])
    llm.wake_up(["kv_cache"])
    llm.wake_up()
    assert not llm.is_sleeping()
    assert tokens_of(llm) == expected


@pytest.mark.parametrize("llm", ["llama"], indirect=True)
def test_cached_prefixes_are_forgotten(llm: LLM) -> None:
    tokens_of(llm)
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)[0].num_cached_tokens
    llm.sleep()
    llm.wake_up()
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize("llm", ["llama"], indirect=True)
def test_sleeping_ends_requests_and_bad_levels_do_not(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("long", PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    with pytest.raises(VLLMValidationError, match="sleep level must be 1"):
        llm.sleep(3)
    assert engine.has_unfinished_requests() and not llm.is_sleeping()
    llm.sleep()
    assert not engine.has_unfinished_requests()
    llm.wake_up()
    assert tokens_of(llm)


@pytest.mark.parametrize("llm", ["llama"], indirect=True)
def test_a_sleep_that_fails_leaves_the_engine_awake(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was released before the failure."""
    expected = tokens_of(llm)
    release, released = ParkedMemory.__init__, []

    def only_once(self: ParkedMemory, tensors: Iterable[Tensor], keep: bool) -> None:
        if released:
            raise RuntimeError("no memory for that")
        release(self, tensors, keep)
        released.append(self.num_bytes)

    monkeypatch.setattr(ParkedMemory, "__init__", only_once)
    with pytest.raises(RuntimeError, match="no memory for that"):
        llm.sleep(2)
    assert released[0] > 0 and not llm.is_sleeping()
    assert tokens_of(llm) == expected


@pytest.mark.parametrize("llm", ["llama"], indirect=True)
def test_weights_changed_on_disk_are_read_at_level_2(llm: LLM) -> None:
    """Level 2 is for new weights: what wakes up is the checkpoint, not a hidden copy."""
    expected = tokens_of(llm)

    def spoil(worker: Any) -> None:
        for parameter in worker.get_model().parameters():
            parameter.data.neg_()

    llm.collective_rpc(spoil)
    assert tokens_of(llm) != expected
    llm.sleep(1)
    llm.wake_up()
    assert tokens_of(llm) != expected
    llm.sleep(2)
    llm.wake_up()
    assert tokens_of(llm) == expected
    llm.collective_rpc(spoil)
    assert tokens_of(llm) != expected
    llm.collective_rpc("reload_weights")
    assert tokens_of(llm) == expected


@pytest.mark.parametrize("llm", ["qwen3_5_tied"], indirect=True)
def test_running_requests_go_on_with_reloaded_weights_alone(llm: LLM) -> None:
    """Nothing computed with the old ones is used for a token sampled later."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def spoil(worker: Any) -> None:
        next(worker.get_model().parameters()).data.neg_()

    llm.collective_rpc(spoil)
    engine.add_request("r", PROMPTS[0], params)
    so_far: list[int] = []
    while len(so_far) < 10:
        so_far = [t for output in engine.step() for t in output.outputs[0].token_ids] or so_far
    llm.collective_rpc("reload_weights")
    output = None
    while engine.has_unfinished_requests():
        output = (engine.step() or [output])[-1]
    assert output is not None and output.finished
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == 40
    # One token may have been on its way.
    fresh = llm.generate([[*PROMPTS[0], *tokens[:12]]], params, use_tqdm=False)[0]
    assert tokens[12:] == list(fresh.outputs[0].token_ids)[:28]


def test_it_has_to_be_enabled() -> None:
    engine = EngineCore(make_vllm_config(), FakeExecutor)
    with pytest.raises(VLLMValidationError, match="enable_sleep_mode"):
        engine.sleeping.sleep(1)
    engine.shutdown()


class SleepyExecutor(FakeExecutor):
    """Forgets every slot when it sleeps."""

    def sleep(self, level: int) -> int:
        assert not self.worker.requests, "the worker was not told what ended"
        self.worker.slots.clear()
        return 1

    def wake_up(self, tags: tuple[str, ...]) -> None:
        assert set(tags) <= {"weights", "kv_cache"}


def sleepy_config(**options: Any) -> VllmConfig:
    config = make_vllm_config(async_scheduling=True, **options)
    assert config.model_config is not None
    config.model_config.enable_sleep_mode = True
    return config


def test_the_core_itself_refuses_requests() -> None:
    """Another front end may not know that the engine sleeps."""
    core = EngineCore(sleepy_config(), SleepyExecutor)
    core.sleeping.sleep(1)
    request = EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=2), 0.0)
    refused = core.add_request(core.receive(request))
    assert refused is not None and refused.finish_reason is FinishReason.ERROR
    assert refused.error is not None and "sleeps" in refused.error
    core.sleeping.wake_up()
    assert core.add_request(core.receive(request)) is None
    with pytest.raises(RuntimeError, match="while requests run"):
        core.sleeping.sleep(1)
    core.shutdown()


def test_a_last_message_is_not_lost_on_the_way_to_sleep() -> None:
    """A stop string and the call to sleep come one after the other."""
    core = EngineCore(sleepy_config(), SleepyExecutor)
    params = SamplingParams(max_tokens=40, stop=["x"], detokenize=True, ignore_eos=True)
    core.add_request(core.receive(EngineCoreRequest("a", [1, 2, 3], params, 0.0)))
    outputs = []
    while len(outputs) < 4:
        outputs += core.step().get(0, EngineCoreOutputs()).outputs
    core.stop_requests([StopRequest("a", 3)])
    core.sleeping.sleep(1)
    last = []
    while core.has_work():
        last += core.step().get(0, EngineCoreOutputs()).outputs
    assert [(one.request_id, one.finish_reason) for one in last] == [("a", FinishReason.STOP)]
    core.shutdown()


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_streams_end_before_the_engine_sleeps(mode: str) -> None:
    async def main() -> None:
        # Nothing ends before it is aborted.
        step_s = 0.1 if mode == "abort" else 0.005
        engine = AsyncLLM(
            sleepy_config(additional_config={"step_s": step_s}), SleepyExecutor, log_stats=False
        )
        params = SamplingParams(max_tokens=60, output_kind=RequestOutputKind.DELTA)
        prompts = [[50 + i, 60, 70] for i in range(4)]

        async def stream(i: int) -> tuple[list[int], str | None]:
            tokens, reason = [], None
            async for output in engine.generate(prompts[i], params, f"r{i}"):
                tokens += output.outputs[0].token_ids
                reason = output.outputs[0].finish_reason
            return tokens, reason

        try:
            streams = [asyncio.create_task(stream(i)) for i in range(4)]
            while engine.output_processor.get_num_unfinished_requests() < 4:
                await asyncio.sleep(0.001)
            asleep = asyncio.create_task(engine.sleep(1, mode))
            await asyncio.sleep(0)
            with pytest.raises(EngineSleepingError):
                await stream(0)
            await asleep
            results = await asyncio.gather(*streams)
            assert await engine.is_sleeping()
            with pytest.raises(EngineSleepingError):  # not as a bad placement
                await anext(engine.generate(prompts[0], SamplingParams(placement="all-gdn"), "p"))
            await engine.wake_up()
            for prompt, (tokens, reason) in zip(prompts, results, strict=True):
                whole = expected_tokens(prompt, params)
                assert tokens == whole[: len(tokens)]
                assert (reason == "abort") == (mode == "abort")
                assert mode == "abort" or tokens == whole
            await engine.collective_rpc("pace", args=(0.0,))
            assert (await stream(0))[0] == expected_tokens(prompts[0], params)
            with pytest.raises(VLLMValidationError, match="'abort' or 'wait'"):
                await engine.sleep(1, "keep")
            assert not await engine.is_sleeping()
        finally:
            engine.shutdown()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def refuses(engine: AsyncLLM) -> bool:
    """Whether the engine refuses requests; both ends must agree."""
    try:
        async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=1), "probe"):
            pass
    except EngineSleepingError:
        return True
    return False


def with_sleepy_engine(run: Callable[[AsyncLLM], Awaitable[None]], step_s: float) -> None:
    async def main() -> None:
        config = sleepy_config(additional_config={"step_s": step_s})
        engine = AsyncLLM(config, SleepyExecutor, log_stats=False)
        try:
            await run(engine)
        finally:
            engine.shutdown()

    asyncio.run(main())


@pytest.mark.usefixtures("forking")
def test_a_wake_up_calls_off_a_sleep_that_waits() -> None:
    async def run(engine: AsyncLLM) -> None:
        async def stream() -> int:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            async for output in engine.generate([5, 6], params, "long"):
                count = len(output.outputs[0].token_ids)
            return count

        running = asyncio.create_task(stream())
        await until(engine.output_processor.has_unfinished_requests)
        waiting = [asyncio.create_task(engine.sleep(1, "wait")) for _ in range(2)]
        while not await engine.is_sleeping():
            await asyncio.sleep(0)
        assert await refuses(engine)
        await engine.wake_up()
        assert not await engine.is_sleeping() and not await refuses(engine)
        await engine.collective_rpc("pace", args=(0.0,))
        for sleep in waiting:
            with pytest.raises(VLLMValidationError, match="woken up before it slept"):
                await sleep
        assert await running == 100
        assert not await engine.is_sleeping() and not await refuses(engine)
        await engine.sleep(1, "wait")
        assert await engine.is_sleeping() and await refuses(engine)

    with_sleepy_engine(run, step_s=0.1)


@pytest.mark.usefixtures("forking")
def test_a_front_end_rests_once_its_core_knows_of_the_aborts() -> None:
    """Another front end then tells the core to sleep, and may be faster than the aborts."""

    async def run(engine: AsyncLLM) -> None:
        async def stream() -> None:
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            async for _ in engine.generate([5, 6], params, "long"):
                pass

        running = asyncio.create_task(stream())
        await until(engine.output_processor.has_unfinished_requests)
        core = psutil.Process(engine.engine_core.process_id)
        rest = engine.rest.resting("abort")
        core.suspend()
        try:
            resting = asyncio.create_task(rest.__aenter__())
            await running
            await asyncio.sleep(0.2)
            assert not resting.done()
        finally:
            core.resume()
        await resting
        await rest.__aexit__(None, None, None)

    with_sleepy_engine(run, step_s=0.05)


@pytest.mark.usefixtures("forking")
def test_sleeps_and_wake_ups_at_once_leave_both_ends_agreed() -> None:
    async def run(engine: AsyncLLM) -> None:
        rng = random.Random(0)
        for _ in range(30):
            calls = []
            for _ in range(rng.randint(1, 5)):
                if rng.random() < 0.5:
                    calls.append(engine.sleep(1, rng.choice(["abort", "wait"])))
                else:
                    calls.append(engine.wake_up())
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(rng.choice([0.0, 0.001, 0.01]))
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with engine.rest._sleep_lock:  # a call nobody waits for may still be on its way
                pass
            assert await refuses(engine) == await engine.is_sleeping()
        await engine.wake_up()
        assert not await refuses(engine)

    with_sleepy_engine(run, step_s=0.0)
