# SPDX-License-Identifier: Apache-2.0
"""Workers over gloo that do not come to a collective outside of steps, and others that are slow."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_models import tiny_model

from tests.v1.executor.fake_worker import gone
from vllm.distributed.parallel_state import get_world_group
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor import hang_watch, stationed
from vllm.v1.executor.hang_watch import Asked, HangWatch
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.pulse import Beat
from vllm.v1.executor.replica_reports import ReplicaReports, Report
from vllm.v1.worker.worker import Worker

pytestmark = [
    pytest.mark.usefixtures("forking"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="workers over gloo"),
]

#: instead of 20 s
LIMIT_S = 4.0
#: from the wait to the end of all processes
END_S = 30.0


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "HANG_S", LIMIT_S)


@pytest.fixture
def start() -> Iterator[Callable[..., MultiprocExecutor]]:
    started: list[MultiprocExecutor] = []

    def make(**options: Any) -> MultiprocExecutor:
        settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
        layout = {"tensor_parallel_size": 2, **options}
        config = EngineArgs(str(tiny_model("llama")), **settings, **layout).create_engine_config()
        started.append(MultiprocExecutor(config))
        return started[-1]

    yield make
    for executor in started:
        executor.shutdown()


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def meet(worker: Worker, late: Callable[[], None] | None = None) -> int:
    if worker.rank == 1 and late is not None:
        late()
    get_world_group().barrier()
    return worker.rank


def lie_down() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_long() -> None:
    time.sleep(600)


LATE = {
    lie_down: r"the worker of rank 1 does not go on, for 4 s: .*rank 1 .*says nothing any more",
    sleep_long: r"no worker goes on, for 4 s: .*rank 1 is in no collective, at .*sleep_long < ",
}


@pytest.mark.parametrize("late", list(LATE))
def test_a_rank_that_does_not_come_to_a_collective_of_a_call(start: Any, late: Any) -> None:
    executor = start()
    failures: list[Exception] = []
    executor.register_failure_callback(failures.append)
    workers = processes_of(executor)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=LATE[late]) as caught:
        executor.collective_rpc(meet, args=(late,))
    assert "rank 0 waits for barrier of ranks 0, 1, at " in str(caught.value)
    assert gone(workers) and time.monotonic() - began < END_S
    assert failures == [caught.value]
    with pytest.raises(TimeoutError):
        executor.check_health()


def processes_of(executor: MultiprocExecutor) -> list[psutil.Process]:
    pids = executor.collective_rpc(lambda worker: os.getpid())
    return [psutil.Process(pid) for pid in pids]


def test_a_rank_that_does_not_come_to_the_start(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Worker._share_threads

    def late_start(worker: Worker) -> None:
        if worker.rank == 1:
            sleep_long()
        share(worker)

    monkeypatch.setattr(Worker, "_share_threads", late_start)
    before = set(multiprocessing.active_children())
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="no worker goes on") as caught:
        start()
    assert "rank 0 waits for meeting of ranks 0, 1, at " in str(caught.value)
    assert "rank 1 is in no collective, at " in str(caught.value)
    assert "sleep_long < late_start" in re.sub(r"\S+:\d+ ", "", str(caught.value))
    assert set(multiprocessing.active_children()) <= before
    assert time.monotonic() - began < END_S


def test_a_rank_that_is_slow_is_waited_for(start: Any) -> None:
    """It computes three times as long as a hang may last, and nobody is ended."""
    executor = start()
    assert executor.collective_rpc(meet, args=(lambda: compute(3 * LIMIT_S),)) == [0, 1]


def test_a_call_that_has_not_been_answered_by_all(start: Any) -> None:
    executor = start()
    workers = processes_of(executor)
    with pytest.raises(TimeoutError, match=r"rank 0 has nothing to do; rank 1 is in no coll"):
        executor.collective_rpc(lambda worker: sleep_long() if worker.rank else None)
    assert gone(workers)


def test_who_calls_may_say_that_it_takes_long(start: Any) -> None:
    executor = start()

    def late(worker: Worker) -> int:
        time.sleep(2 * LIMIT_S * worker.rank)
        return worker.rank

    assert executor.collective_rpc(late, timeout=10 * LIMIT_S) == [0, 1]


def test_calls_that_wait_for_something_else_are_no_hang(start: Any) -> None:
    """Nobody waits for another rank."""
    executor = start()
    assert executor.collective_rpc(lambda worker: time.sleep(2 * LIMIT_S)) == [None, None]


def test_a_collective_that_all_are_in_gets_more_time() -> None:
    """And no rank that a slow network keeps in it is blamed before."""
    watch, beat = _watch(), Beat("all-reduce of ranks 0, 1", False, 0.0, "here")
    for rank in (0, 1):
        watch.take(rank, replace(beat, still_s=LIMIT_S + 1))
    assert watch.look(0.1) is None
    for rank in (0, 1):
        watch.take(rank, replace(beat, still_s=hang_watch.SLOW_S + 1))
    assert "no worker goes on, for 120 s" in (watch.look(0.1) or "")


def test_a_replica_has_reported_when_its_watch_has_begun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be stopped right after."""
    monkeypatch.setattr(HangWatch, "_run", lambda self: None)
    own = ReplicaReports(str(tmp_path), 1, 2)
    HangWatch(range(1), lambda: None, lambda rank: True, lambda error: None, own).start()
    other = Report(0.0, 0.0, [], None)
    seen = ReplicaReports(str(tmp_path), 0, 2).exchange(other)[1]
    assert seen.places == ["replica 1: rank 0 has said nothing so far"]
    time.sleep(0.05)
    assert ReplicaReports(str(tmp_path), 0, 2).exchange(other)[1].still_s >= 0.05


def _watch() -> HangWatch:
    return HangWatch(range(2), lambda: Asked(is_call=False), lambda rank: None, lambda error: None)


def test_a_shutdown_with_a_rank_that_hangs(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """It is killed after the time that workers get to stop."""
    monkeypatch.setattr(stationed, "STOP_S", 1.0)
    executor = start()
    workers = processes_of(executor)
    workers[1].suspend()
    began = time.monotonic()
    executor.shutdown()
    assert gone(workers) and time.monotonic() - began < END_S
