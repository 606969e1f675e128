# SPDX-License-Identifier: Apache-2.0
"""The asynchronous engine: streams, aborts, failures."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from contextlib import asynccontextmanager

import pytest

from tests.v1.engine.fakes import (
    EOS,
    VOCAB_SIZE,
    FakeExecutor,
    expected_tokens,
    make_vllm_config,
)
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, RequestConflict
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]


def test_pooling_is_refused_with_what_there_is() -> None:
    with pytest.raises(NotImplementedError, match=r"AsyncLLM.encode needs a pooling.*use generate"):
        AsyncLLM.encode(object(), "text")


@asynccontextmanager
async def running(log_stats=False, **options):
    options.setdefault("async_scheduling", True)
    engine = AsyncLLM(make_vllm_config(**options), FakeExecutor, log_stats)
    try:
        yield engine
    finally:
        engine.shutdown()


def prompt_of(seed, length):
    return random.Random(seed).choices(range(20, VOCAB_SIZE), k=length)


async def until(condition):
    """Wait for a condition that a slow machine reaches too, if late."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.01)


async def collect(engine, request_id, prompt, params):
    return [output async for output in engine.generate(prompt, params, request_id)]


def test_many_streams_at_once():
    async def main():
        async with running(num_blocks=40) as engine:
            params = SamplingParams(max_tokens=30, output_kind=RequestOutputKind.DELTA)
            prompts = [prompt_of(i, 5 + i) for i in range(20)]
            results = await asyncio.gather(
                *(collect(engine, f"r{i}", p, params) for i, p in enumerate(prompts))
            )
            for prompt, outputs in zip(prompts, results, strict=True):
                tokens = [t for o in outputs for t in o.outputs[0].token_ids]
                assert tokens == expected_tokens(prompt, params, eos=EOS)
                assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            assert not engine.output_processor.has_unfinished_requests()
            assert not engine._handler.streams

    asyncio.run(main())


def test_n_completions_stream_with_their_index():
    async def main():
        async with running() as engine:
            for kind in RequestOutputKind:
                params = SamplingParams(n=3, max_tokens=5, output_kind=kind)
                outputs = await collect(engine, "a", prompt_of(0, 9), params)
                tokens = {0: [], 1: [], 2: []}
                for output in outputs:
                    for completion in output.outputs:
                        if kind is RequestOutputKind.DELTA:
                            tokens[completion.index] += completion.token_ids
                        else:
                            tokens[completion.index] = completion.token_ids
                assert [len(t) for t in tokens.values()] == [5, 5, 5]
                assert outputs[-1].finished
                if kind is RequestOutputKind.CUMULATIVE:
                    assert len(outputs[-1].outputs) == 3

    asyncio.run(main())


def test_leaving_the_loop_aborts_in_the_core():
    async def main():
        async with running(additional_config={"step_s": 0.005}) as engine:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            stream = engine.generate(prompt_of(0, 9), params, "gone")
            async for _ in stream:
                break
            await stream.aclose()
            assert not engine.output_processor.has_unfinished_requests()
            assert await engine.reset_prefix_cache() is True  # no block is in use any more

    asyncio.run(main())


def test_metrics_count_who_was_aborted_and_who_left():
    async def main():
        async with running(log_stats=True, additional_config={"step_s": 0.02}) as engine:
            params = SamplingParams(max_tokens=200, ignore_eos=True, n=2)
            streams = [engine.generate(prompt_of(0, 9), params, name) for name in "ab"]
            for stream in streams:
                await anext(stream)
            await engine.abort("a")
            assert [one.finished async for one in streams[0]][-1]
            await streams[1].aclose()
            await collect(engine, "c", prompt_of(0, 9), SamplingParams(max_tokens=2))
            pattern = rb'success_total\{.*finished_reason="(\w+)".*\} (\d+)'
            counts = dict(re.findall(pattern, engine.metrics_text()))
            assert (counts[b"abort"], counts[b"length"]) == (b"4", b"1")

    asyncio.run(main())


def test_usage_is_told_after_a_reset_that_ends_pins():
    """Also by a core that has nothing else to do."""

    async def main():
        async with running(log_stats=True) as engine:
            prompt = {"prompt_token_ids": prompt_of(0, 40), "cache_pin_seconds": 300.0}
            await collect(engine, "a", prompt, SamplingParams(max_tokens=2))

            def usage() -> float:
                found = re.findall(rb"kv_cache_usage_perc\{.*\} (\S+)", engine.metrics_text())
                return float(found[0])

            assert usage() > 0
            assert await engine.reset_prefix_cache() is True
            async with asyncio.timeout(20):
                while usage():
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_abort_ends_the_stream():
    async def main():
        async with running(additional_config={"step_s": 0.05}) as engine:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            outputs = []
            async for output in engine.generate(prompt_of(0, 9), params, "a"):
                if not outputs:
                    await engine.abort("a")
                outputs.append(output)
            assert outputs[-1].outputs[0].finish_reason == "abort" and outputs[-1].finished

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "raised"),
    [("lost blocks", EngineGenerateError), (RequestConflict("a dead end"), VLLMValidationError)],
)
def test_the_failure_of_one_completion_ends_all_of_the_request(error, raised):
    async def main():
        async with running(additional_config={"step_s": 0.05}) as engine:
            params = SamplingParams(
                n=3, max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            stream = engine.generate(prompt_of(0, 9), params, "a")
            await anext(stream)
            failing = next(iter(engine.output_processor.request_states))
            last = EngineCoreOutput(failing, [], finish_reason=FinishReason.ERROR, error=error)
            engine.engine_core.abort_requests([failing])
            wire = MsgpackEncoder().encode(EngineCoreOutputs([last]))
            received = MsgpackDecoder(EngineCoreOutputs).decode(wire)
            engine.output_processor.process_outputs(received)
            with pytest.raises(raised, match="lost blocks|a dead end"):
                async for _ in stream:
                    pass
            assert not engine.output_processor.has_unfinished_requests()
            assert await engine.reset_prefix_cache() is True  # nor does anything run in the core

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["fail_at_step", "exit_at_step", "kill"])
def test_death_fails_every_stream_at_once(fault):
    async def main():
        faults = {"step_s": 0.05} | ({} if fault == "kill" else {fault: 5})
        async with running(additional_config=faults) as engine:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            tasks = [
                asyncio.create_task(collect(engine, f"r{i}", prompt_of(i, 9), params))
                for i in range(5)
            ]
            await asyncio.sleep(0.02)
            if fault == "kill":
                os.kill(engine.engine_core.process_id, signal.SIGKILL)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
            assert all(isinstance(result, EngineDeadError) for result in results)
            assert engine.errored and not engine.is_running
            with pytest.raises(EngineDeadError):
                await engine.check_health()
            with pytest.raises(EngineDeadError):
                await collect(engine, "late", [1, 2], params)

    asyncio.run(main())


def test_death_without_any_request_is_noticed():
    async def main():
        async with running() as engine:
            await engine.check_health()
            os.kill(engine.engine_core.process_id, signal.SIGKILL)
            await until(lambda: engine.errored)
            assert "exit code -9" in str(engine.dead_error)

    asyncio.run(main())


def test_invalid_requests_never_reach_the_core():
    async def main():
        async with running() as engine:
            for prompt in ([], [VOCAB_SIZE], [1] * 512, "text without a tokenizer"):
                with pytest.raises(VLLMValidationError):
                    await collect(engine, "bad", prompt, SamplingParams())
            assert await collect(engine, "good", [1, 2], SamplingParams(max_tokens=1))

    asyncio.run(main())


@pytest.mark.parametrize(
    "params", [SamplingParams(stop_token_ids=[5], extra_args={"a": "\ud800"}), SamplingParams()]
)
def test_a_request_that_cannot_be_sent_is_not_kept(params, monkeypatch):
    """Neither one that is refused for what it holds nor one whose sending fails."""

    async def main():
        async with running() as engine:
            if params.extra_args is None:

                def fail(requests):
                    raise OSError("no buffer space")

                monkeypatch.setattr(engine.engine_core, "add_requests", fail)
            for prompt in ([1, 2], [1] * 400):
                with pytest.raises((VLLMValidationError, OSError)):
                    await collect(engine, "bad", prompt, params)
            assert not engine.output_processor.has_unfinished_requests()
            assert not engine._handler.streams
            assert engine.unfinished_request_ids() == []

    asyncio.run(main())


def test_n_completions_travel_as_one_request(monkeypatch):
    async def main():
        async with running() as engine:
            sent, add = [], engine.engine_core.add_requests
            monkeypatch.setattr(
                engine.engine_core, "add_requests", lambda r: (sent.append(len(r)), add(r))
            )
            params = SamplingParams(n=40, max_tokens=2, seed=2**63 - 10, ignore_eos=True)
            (*_, last) = await collect(engine, "a", prompt_of(0, 9), params)
            assert sent == [1] and [c.index for c in last.outputs] == list(range(40))

    asyncio.run(main())


def test_shutdown_fails_pending_streams():
    async def main():
        async with running(additional_config={"step_s": 0.05}) as engine:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            task = asyncio.create_task(collect(engine, "a", prompt_of(0, 9), params))
            await until(engine.output_processor.has_unfinished_requests)
            engine.shutdown()
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(task, 60)

    asyncio.run(main())


def test_a_slow_consumer_gets_merged_deltas():
    async def main():
        async with running() as engine:
            params = SamplingParams(
                max_tokens=50, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            prompt = prompt_of(0, 9)
            tokens, messages = [], 0
            async for output in engine.generate(prompt, params, "slow"):
                tokens += output.outputs[0].token_ids
                messages += 1
                await until(lambda: not engine.output_processor.has_unfinished_requests())
            assert tokens == expected_tokens(prompt, params)
            assert messages <= 2

    asyncio.run(main())


def test_collective_rpc_before_any_request():
    async def main():
        async with running() as engine:
            ((_, pid, _, _),) = await engine.collective_rpc("echo")
            assert pid == engine.engine_core.process_id

    asyncio.run(main())
