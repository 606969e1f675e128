# SPDX-License-Identifier: Apache-2.0
"""The synchronous engine, in process and over a core process."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time

import pytest
import zmq

from tests.v1.engine.fakes import (
    EOS,
    VOCAB_SIZE,
    FakeExecutor,
    expected_tokens,
    make_vllm_config,
    next_token,
)
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import client_link
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.llm_engine import LLMEngine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]


def make_engine(multiprocess=False, log_stats=False, **options):
    return LLMEngine(make_vllm_config(**options), FakeExecutor, log_stats, multiprocess)


def run(engine):
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    return finished


def prompt_of(seed, length):
    return random.Random(seed).choices(range(20, VOCAB_SIZE), k=length)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().split(")")[1].split()[0] != "Z"


@pytest.mark.parametrize("multiprocess", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_generates_what_the_model_says(multiprocess, async_scheduling):
    engine = make_engine(multiprocess, async_scheduling=async_scheduling, num_blocks=40)
    prompts = {f"r{i}": prompt_of(i, 5 + 9 * i) for i in range(10)}
    params = SamplingParams(max_tokens=40, logprobs=2, prompt_logprobs=1)
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params)
    finished = run(engine)
    for request_id, prompt in prompts.items():
        output = finished[request_id]
        completion = output.outputs[0]
        assert completion.token_ids == expected_tokens(prompt, params, eos=EOS)
        assert output.prompt_token_ids == prompt and len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for position, token in enumerate(prompt[1:], 1):
            assert output.prompt_logprobs[position][token].rank == token % 5 + 1
        assert [next(iter(row)) for row in completion.logprobs] == completion.token_ids
        assert completion.cumulative_logprob == pytest.approx(
            sum(-(t % 5) - 0.5 for t in completion.token_ids)
        )
    engine.shutdown()


def test_n_completions_are_gathered_in_order():
    engine = make_engine()
    engine.add_request("a", prompt_of(0, 9), SamplingParams(n=3, seed=5, max_tokens=4))
    seen = [o for _ in range(20) if engine.has_unfinished_requests() for o in engine.step()]
    assert [c.index for c in seen[-1].outputs] == [0, 1, 2]
    assert seen[-1].finished and not any(o.finished for o in seen[:-1])
    assert all(len(c.token_ids) == 4 for c in seen[-1].outputs)


def test_abort_returns_the_last_output_and_stops_the_core():
    engine = make_engine()
    engine.add_request("a", prompt_of(0, 9), SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(5):
        engine.step()
    (last,) = engine.abort_request("a")
    assert last.finished and last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) == 5
    assert engine.abort_request(["a", "unknown"]) == []
    assert not engine.engine_core.engine_core.has_work()


def test_output_kinds():
    prompt, params = prompt_of(0, 9), {"max_tokens": 6, "ignore_eos": True}
    expected = expected_tokens(prompt, SamplingParams(**params))
    for kind in RequestOutputKind:
        engine = make_engine()
        engine.add_request("a", prompt, SamplingParams(output_kind=kind, **params))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        tokens = [o.outputs[0].token_ids for o in outputs]
        if kind is RequestOutputKind.FINAL_ONLY:
            assert tokens == [expected]
        elif kind is RequestOutputKind.DELTA:
            assert tokens == [[t] for t in expected]
        else:
            assert tokens == [expected[: i + 1] for i in range(6)]


def test_eos_ends_with_stop_and_no_reason():
    prompt = next(p for p in (prompt_of(i, 6) for i in range(100000)) if next_token(p) == EOS)
    engine = make_engine()
    engine.add_request("a", prompt, SamplingParams(max_tokens=9))
    completion = run(engine)["a"].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_utilities_over_the_process_keep_types(monkeypatch):
    engine = make_engine(True)
    (reply,) = engine.collective_rpc("echo", args=((1, {2}),), kwargs={"a": None})
    _, pid, args, kwargs = reply
    assert pid != os.getpid() and args == ((1, {2}),) and kwargs == {"a": None}
    assert engine.reset_prefix_cache() is True
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        engine.collective_rpc(lambda worker: 1)
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        engine.apply_model(lambda model: 1)
    with pytest.raises(EngineGenerateError, match="no_such_method"):
        engine.collective_rpc("no_such_method")
    with pytest.raises(VLLMValidationError, match="the worker cannot") as refused:
        engine.collective_rpc("refuse")
    assert refused.value.parameter == "method"
    engine.shutdown()
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    engine = make_engine(True)
    assert engine.collective_rpc(lambda worker, x: worker.num_steps + x, args=(5,)) == [5]
    engine.shutdown()


def test_start_up_errors_name_their_cause():
    for multiprocess in (False, True):
        with pytest.raises(RuntimeError, match="no such weights"):
            make_engine(multiprocess, additional_config={"fail_at_start": "no such weights"})
        with pytest.raises(ValueError, match="max_model_len"):
            make_engine(multiprocess, num_blocks=5)


def test_max_model_len_auto_shrinks_to_memory_and_is_reported():
    config = make_vllm_config(num_blocks=None, additional_config={"memory": 9216})
    config.model_config.max_model_len_auto = True
    engine = LLMEngine(config, FakeExecutor, False, True)
    assert config.model_config.max_model_len == 128
    assert config.cache_config.num_gpu_blocks == 9
    engine.add_request("a", prompt_of(0, 100), SamplingParams(max_tokens=400, ignore_eos=True))
    assert len(run(engine)["a"].outputs[0].token_ids) == 28
    engine.shutdown()


@pytest.mark.parametrize("fault", ["fail_at_step", "exit_at_step"])
def test_a_dying_core_fails_pending_and_later_calls(fault):
    engine = make_engine(True, additional_config={fault: 3})
    engine.add_request("a", prompt_of(0, 9), SamplingParams(max_tokens=50, ignore_eos=True))
    with pytest.raises(EngineDeadError) as caught:
        run(engine)
    assert ("injected" if fault == "fail_at_step" else "exit code 9") in str(caught.value)
    with pytest.raises(EngineDeadError):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.add_request("b", [1, 2], SamplingParams())
    with pytest.raises(EngineDeadError):
        engine.reset_prefix_cache()
    process = engine.engine_core.links[0].core.process
    engine.shutdown()
    assert not process.is_alive() and process.exitcode != 0


def test_killed_core_fails_a_waiting_utility():
    engine = make_engine(True, additional_config={"step_s": 0.3})
    client = engine.engine_core
    future = client.links[0].call("collective_rpc", "hang_on")
    os.kill(client.process_id, signal.SIGKILL)
    with pytest.raises((EngineDeadError, EngineGenerateError)):
        future.result(timeout=60)
        client.call_utility("reset_prefix_cache")
    engine.shutdown()


def test_shutdown_and_collection_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    num_fds = None
    for _ in range(3):
        engine = make_engine(True)
        assert isinstance(engine.engine_core, SyncMPClient)
        pid = engine.engine_core.process_id
        assert is_alive(pid)
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=3))
        run(engine)
        del engine
        gc.collect()
        assert not is_alive(pid)
        assert list(tmp_path.iterdir()) == []
        fds = len(os.listdir("/proc/self/fd"))
        assert num_fds is None or fds <= num_fds
        num_fds = fds


def test_terminate_signal_ends_the_core_cleanly():
    engine = make_engine(True)
    link = engine.engine_core.links[0]
    process = link.core.process
    process.terminate()
    link._reader.join(60)  # it collects the exit status, which only one thread can
    process.join(60)
    assert process.exitcode == 0
    with pytest.raises(EngineDeadError):
        engine.engine_core.call_utility("reset_prefix_cache")
    engine.shutdown()


def test_what_a_core_said_last_is_its_cause_of_death(monkeypatch):
    """Even if the end of its process is seen first, as it may be on a busy machine."""

    class LatePoller(zmq.Poller):
        """What arrives is seen once the process has ended, and not at the first look."""

        looked_again = False

        def poll(self, timeout=None):
            found = dict(super().poll(timeout))
            if any(isinstance(one, zmq.Socket) for one in found):
                time.sleep(1.0)
                found = dict(super().poll(0))
            others = {one: event for one, event in found.items() if not isinstance(one, zmq.Socket)}
            if others and not self.looked_again:
                self.looked_again = True
                return list(others.items())
            return list(found.items())

    monkeypatch.setattr(client_link.zmq, "Poller", LatePoller)
    engine = make_engine(True, additional_config={"fail_at_step": 1})
    engine.add_request("r", prompt_of(0, 8), SamplingParams(max_tokens=4))
    with pytest.raises(EngineDeadError, match="injected step failure"):
        run(engine)
    engine.shutdown()


def test_sending_before_the_death_is_known_does_not_hang():
    """A socket whose peer is gone accepts nothing, and would wait for ever."""
    engine = make_engine(True)
    link = engine.engine_core.links[0]
    link.core.process.kill()
    link._reader.join(60)
    # The socket may notice later than the reader, which sees the process end, and would take this.
    while link._requests.poll(0, zmq.POLLOUT):
        time.sleep(0.001)
    death, link.dead = link.dead, None
    threading.Timer(0.2, lambda: setattr(link, "dead", death)).start()
    with pytest.raises(EngineDeadError):
        engine.engine_core.call_utility("reset_prefix_cache")
    link.dead = None
    engine.shutdown()


def test_inproc_engine_is_freed_when_forgotten():
    engine = make_engine()
    executor = engine.engine_core.engine_core.executor
    del engine
    gc.collect()
    assert executor.is_shut_down
