# SPDX-License-Identifier: Apache-2.0
"""The core's loop, its set-up, and how its process is started."""

from __future__ import annotations

import threading
import time

import pytest

from tests.forked_python import run_python
from tests.nightly import nightly
from tests.v1.engine.fakes import FakeExecutor, expected_tokens, make_vllm_config
from vllm import decisions
from vllm.cache_options import CacheOptions
from vllm.sampling_params import SamplingParams
from vllm.utils.start_method import start_method
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore


class CountingScheduler(AsyncScheduler):
    """Found by its dotted path."""


def make_core(**options):
    return EngineCore(make_vllm_config(**options), FakeExecutor)


def add(core, request_id="a", prompt=(5, 6, 7), **params):
    params.setdefault("max_tokens", 5)
    request = EngineCoreRequest(
        request_id, list(prompt), SamplingParams(ignore_eos=True, **params), 0.0
    )
    return core.add_request(core.receive(request))


def run(core):
    outputs = []
    while core.has_work():
        for message in core.step().values():
            outputs += message.outputs
    return outputs


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_until_done(async_scheduling):
    core = make_core(async_scheduling=async_scheduling)
    add(core)
    tokens = [t for output in run(core) for t in output.new_token_ids]
    assert tokens == expected_tokens([5, 6, 7], SamplingParams(max_tokens=5))
    assert core.only_waits and core.executor.worker.requests == {}
    core.shutdown()
    core.shutdown()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_pin_ends_in_an_idle_core(async_scheduling, monkeypatch):
    """Nobody sends a request: its end alone is work, and what it frees is told."""
    core = make_core(async_scheduling=async_scheduling)
    request = EngineCoreRequest(
        "a", list(range(50)), SamplingParams(max_tokens=2), 0.0, cache=CacheOptions(pin_seconds=60)
    )
    core.add_request(core.receive(request))
    run(core)
    manager = core.scheduler.kv_cache_manager
    assert manager.usage > 0 and not core.has_work()
    now = time.monotonic()
    monkeypatch.setattr(manager.pins, "_clock", lambda: now + 61)
    assert core.has_work()
    usages = []
    while core.has_work():
        for message in core.step().values():
            usages.append(message.scheduler_stats.kv_cache_usage)
    assert usages == [0.0] and manager.usage == 0
    core.shutdown()


def test_asynchronous_core_keeps_two_steps_in_flight():
    core = make_core(async_scheduling=True)
    add(core)
    assert core.step() == {} and len(core._in_flight) == 1
    produced = core.step()
    assert len(produced[0].outputs) == 1 and len(core._in_flight) == 1
    core.shutdown()


def test_synchronous_core_never_has_a_step_in_flight_between_calls():
    core = make_core()
    add(core)
    assert core.step()[0].outputs and not core._in_flight
    core.shutdown()


def test_an_id_in_use_is_refused_without_harm():
    core = make_core()
    assert add(core) is None
    refused = add(core)
    assert refused.finish_reason is FinishReason.ERROR and "still in use" in refused.error
    assert len(run(core)) == 5
    core.shutdown()


def test_scheduler_class():
    core = make_core(
        async_scheduling=True, scheduler_cls="tests.v1.engine.test_core.CountingScheduler"
    )
    assert type(core.scheduler).__name__ == "CountingScheduler"
    core.shutdown()
    with pytest.raises(ValueError, match="--no-async-scheduling"):
        make_core(async_scheduling=True, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    assert type(make_core().scheduler) is Scheduler


def test_unknown_utility():
    core = make_core()
    with pytest.raises(ValueError, match="no utility 'nap'"):
        core.call_utility("nap", ())
    core.shutdown()


def test_failed_set_up_stops_the_executor(monkeypatch):
    """With the reason, which hosts that have loaded the model could not know."""
    reasons = []
    monkeypatch.setattr(FakeExecutor, "shutdown", lambda self, reason: reasons.append(reason))
    with pytest.raises(ValueError, match="max_model_len"):
        make_core(num_blocks=4)
    assert len(reasons) == 1 and "max_model_len" in reasons[0]


def test_slow_step_times_out(monkeypatch):
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1")
    core = make_core(additional_config={"step_s": 3.0})
    add(core)
    with pytest.raises(TimeoutError, match="no result after 1 s.*VLLM_EXECUTE_MODEL_TIMEOUT"):
        run(core)
    core.shutdown()


def test_start_method_avoids_forking_threads(monkeypatch):
    threads = [threading.current_thread()]  # tests that ran before may have left others
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert start_method() == "spawn"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert start_method() == "fork"
    threads.append(threading.Thread())
    assert start_method() == "spawn"
    (record,) = [d for d in decisions.decisions() if d.what == "engine core start method"]
    assert (record.chosen, record.instead_of) == ("spawn", "fork") and "threads" in record.why


def test_start_method_avoids_forking_a_process_that_uses_cuda(monkeypatch):
    monkeypatch.setattr(threading, "enumerate", list)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr("vllm.utils.start_method.cuda_is_initialised", lambda: True)
    assert start_method() == "spawn"
    monkeypatch.setattr("vllm.utils.start_method.cuda_is_initialised", lambda: False)
    assert start_method() == "fork"


_SCRIPT = """
import os, sys, time
from tests.v1.engine.fakes import FakeExecutor, make_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

if __name__ == "__main__":
    engine = LLMEngine(make_vllm_config(), FakeExecutor, False, True)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = output.outputs[0].token_ids
    print(engine.engine_core.process_id, tokens, flush=True)
    if sys.argv[1] == "crash":
        os._exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "method"),
    [("return", "fork"), ("crash", "fork"), ("crash", "spawn"), *nightly(("return", "spawn"))],
)
def test_core_ends_with_its_parent(tmp_path, monkeypatch, method, end):
    """Also when the parent returns without a shutdown, and when it dies without a word."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", method)
    done = run_python(str(script), end, timeout=240)
    assert done.returncode == (3 if end == "crash" else 0), done.stderr
    pid, tokens = done.stdout.split(" ", 1)
    assert tokens.strip() == str(expected_tokens([5, 6, 7], SamplingParams(max_tokens=5)))
    assert _gone(int(pid)), "the core outlived its parent"


def _gone(pid):
    import time

    for _ in range(600):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().split(")")[1].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):  # the latter between opening and reading
            return True
        time.sleep(0.1)
    return False
