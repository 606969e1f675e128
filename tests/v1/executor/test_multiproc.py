# SPDX-License-Identifier: Apache-2.0
"""Processes of workers: what they are told and answer, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tiny_models import tiny_model

from tests.v1.executor.fake_worker import (
    END_S,
    FakeWorker,
    config_of,
    filled,
    gone,
    processes,
    step,
    wait_until,
)
from tests.v1.executor.quick_clock import end_soon
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.executor import local_workers, stationed
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.station import WorkerDiedError
from vllm.v1.worker import worker as worker_module

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MultiprocExecutor]]:
    monkeypatch.setattr(worker_module, "Worker", FakeWorker)
    end_soon(monkeypatch)
    started: list[MultiprocExecutor] = []

    def make(**changes: Any) -> MultiprocExecutor:
        started.append(MultiprocExecutor(config_of(**changes)))
        return started[-1]

    yield make
    for executor in started:
        executor.shutdown()


def test_rank_0_answers_steps_and_all_answer_calls(start: Any) -> None:
    executor = start()
    futures = [step(executor, number) for number in range(20)]
    assert executor.collective_rpc(lambda worker: (worker.rank, worker.steps)) == [
        (0, list(range(20))),
        (1, list(range(20))),
    ]
    outputs = [future.result(20) for future in futures]
    assert [output.req_ids for output in outputs] == [["0"]] * 20
    assert [output.sampled_token_ids[0] for output in outputs] == [[n] for n in range(20)]
    choice = {d.what: d.chosen for d in executor.vllm_config.decisions.decisions()}[
        "a choice of the worker"
    ]
    assert choice == "0"
    executor.check_health()


def test_a_worker_that_is_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing but what is sent to it, pickled."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
    executor = MultiprocExecutor(
        EngineArgs(
            str(tiny_model("llama")), distributed_executor_backend="mp", **settings
        ).create_engine_config()
    )
    try:
        (layers,) = executor.collective_rpc("get_kv_cache_spec")
        assert len(layers) > 1
    finally:
        executor.shutdown()


def test_the_last_pipeline_stage_answers_steps(start: Any) -> None:
    """And only it keeps the masks."""
    executor = start(output_rank=1)
    future = step(executor, 0)
    assert future.result(20).req_ids == ["1"]
    connected = start(output_rank=1, kv_transfer_config=object())
    assert step(connected, 0).result(20).req_ids == ["1"]


def test_masks_overtake_the_steps_that_were_sent_before_them(start: Any) -> None:
    executor = start()
    first, between, second = (
        step(executor, 0, "masks"),
        step(executor, 1),
        step(executor, 2, "masks"),
    )
    executor.send_token_masks(filled(7))
    assert first.result(20).sampled_token_ids == [[0], [[7]]]
    assert between.result(20).sampled_token_ids == [[1], []]
    assert not second.done()
    executor.send_token_masks(filled(8))
    assert second.result(20).sampled_token_ids == [[2], [[8]]]


def test_a_refused_call_keeps_its_error_and_the_workers(start: Any) -> None:
    executor = start()
    with pytest.raises(VLLMValidationError, match="not me") as caught:
        executor.collective_rpc("refuse")
    assert caught.value.parameter == "method"
    with pytest.raises(RuntimeError, match="lock"):
        executor.collective_rpc(lambda worker: threading.Lock())
    assert step(executor, 3).result(20).sampled_token_ids == [[3], []]


def test_reports_of_connectors_come_from_all_ranks(start: Any) -> None:
    executor = start(kv_transfer_config="some")
    executor.init_kv_output_aggregator(SimpleNamespace(get_finished_count=lambda: None))
    output = step(executor, 4).result(20)
    assert output.req_ids == ["0"] and output.kv_connector_output.finished_sending == {"r4"}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_between_steps_ends_all(start: Any, victim: int) -> None:
    executor = start()
    failures: list[Exception] = []
    executor.register_failure_callback(failures.append)
    workers = processes(executor)
    workers[victim].kill()
    assert gone(workers)
    with pytest.raises(WorkerDiedError, match=rf"rank {victim} died \(SIGKILL\)"):
        executor.check_health()
    with pytest.raises(WorkerDiedError):
        step(executor, 0)
    assert len(failures) == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_in_a_step_ends_all_and_fails_the_step(start: Any, victim: int) -> None:
    executor = start()
    workers = processes(executor)
    futures = [step(executor, 1), step(executor, 2, f"die {victim}"), step(executor, 3, "hang")]
    with pytest.raises(WorkerDiedError, match=f"rank {victim} died"):
        futures[1 if victim == 0 else 2].result(20)
    assert gone(workers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_step_is_the_end_of_all(start: Any, rank: int) -> None:
    executor = start()
    workers = processes(executor)
    step(executor, 0, f"fail {rank}")
    with pytest.raises(RuntimeError, match=f"rank {rank} cannot"):
        step(executor, 1, "hang").result(20)
    assert gone(workers)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_hangs_is_named_and_killed(
    start: Any, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, so that it takes neither the step nor the request to end."""
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1")
    executor = start()
    failures: list[Exception] = []
    executor.register_failure_callback(failures.append)
    workers = processes(executor)
    workers[victim].suspend()
    future = step(executor, 0)
    wait_until(lambda: executor._stations[0].slow_ranks() == [victim])
    error = executor.overdue()
    assert isinstance(error, TimeoutError)
    assert f"rank {victim} does not go on: a step has no result after 1 s" in str(error)
    assert gone(workers)
    assert failures == [error]
    if victim == 0:
        with pytest.raises(TimeoutError, match="no result after 1 s"):
            future.result(20)
    with pytest.raises(TimeoutError, match="does not go on"):
        step(executor, 1)


def test_a_step_that_hangs_everywhere_blames_nobody(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = start()
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1")
    workers = processes(executor)
    step(executor, 0, "hang")
    sender = executor._stations[0].sender
    wait_until(lambda: sender._taken.tolist() == [sender._num_written] * 2)
    assert not sender.slowest_receivers()
    assert str(executor.overdue()).startswith("a step has no result after 1 s")
    assert gone(workers)


def test_an_error_that_a_death_has_caused_is_not_the_cause(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' collectives fail before the death of the process is seen."""
    monkeypatch.setattr(stationed, "_BLAME_S", 20.0)
    executor = start()
    workers = processes(executor)
    workers[1].suspend()
    waiting = step(executor, 0, "fail 0")
    wait_until(lambda: executor._blamed is not None)
    workers[1].kill()
    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        waiting.result(20)
    assert gone(workers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_start_keeps_its_error(start: Any, rank: int) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(VLLMValidationError, match="checkpoint is not there"):
        start(fails=rank)
    assert set(multiprocessing.active_children()) <= before


def test_an_interrupted_start_waits_for_nobody(start: Any) -> None:
    began: list[float] = []

    def interrupt(*_: Any) -> None:
        began.append(time.monotonic())
        raise InterruptedError("stop")

    def alarm_who_waits_for_the_workers() -> None:
        wait_until(lambda: any(thread.name == "collect" for thread in threading.enumerate()))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before = set(multiprocessing.active_children())
    handler = signal.signal(signal.SIGALRM, interrupt)
    alarm = threading.Thread(target=alarm_who_waits_for_the_workers)
    alarm.start()
    try:
        with pytest.raises(InterruptedError):
            start(fails="never")
    finally:
        alarm.join()
        signal.signal(signal.SIGALRM, handler)
    assert set(multiprocessing.active_children()) <= before
    assert time.monotonic() - began[0] < END_S


def test_shutdown_lets_workers_say_goodbye(start: Any, tmp_path: Path) -> None:
    executor = start(farewell=str(tmp_path))
    workers = processes(executor)
    waiting = step(executor, 0, "masks")
    executor.shutdown()
    executor.shutdown()
    assert gone(workers) and sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]
    with pytest.raises((CancelledError, RuntimeError)):
        waiting.result(20)
    with pytest.raises(RuntimeError, match="shut down"):
        executor.check_health()


def test_a_signal_to_all_processes_leaves_the_end_to_the_core(start: Any, tmp_path: Path) -> None:
    executor = start(farewell=str(tmp_path))
    for worker in processes(executor):
        worker.terminate()
    assert step(executor, 5).result(20).sampled_token_ids == [[5], []]
    executor.shutdown()
    assert len(list(tmp_path.iterdir())) == 2


def test_survivors_of_a_death_say_goodbye(start: Any, tmp_path: Path) -> None:
    executor = start(farewell=str(tmp_path))
    workers = processes(executor)
    workers[0].kill()
    assert gone(workers)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def _close_and_die(pipe: Any) -> None:
    pipe.close()
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_may_end_later_than_its_pipe() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_close_and_die, args=(theirs,))
    process.start()
    theirs.close()
    with pytest.raises(EOFError):
        ours.recv_bytes()
    assert "rank 3 died (SIGKILL)" in str(local_workers._Process(3, process, ours).death())


def _start_and_tell(pids: Any) -> None:
    executor = MultiprocExecutor(config_of())
    pids.send(executor.collective_rpc("pid"))
    time.sleep(600)


def test_workers_end_with_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "Worker", FakeWorker)
    context = multiprocessing.get_context("fork")
    pids, theirs = context.Pipe(duplex=False)
    parent = context.Process(target=_start_and_tell, args=(theirs,))
    parent.start()
    workers = [psutil.Process(pid) for pid in pids.recv()]
    parent.kill()
    parent.join()
    assert gone(workers)
