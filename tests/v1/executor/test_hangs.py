# SPDX-License-Identifier: Apache-2.0
"""Workers over gloo that do not come to a collective outside of steps, and others that are slow."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.v1.executor.fake_worker import gone, wait_until
from tests.v1.executor.hangs import END_S, compute, executors, lie_down, sleep_long
from tests.v1.executor.quick_clock import LIMIT_S, end_soon, use_quick_clock
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.executor import pulse as pulse_module
from vllm.v1.executor import stationed
from vllm.v1.executor.hang_watch import HangWatch
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.pulse import NEXT_MESSAGE, Beat, Pulse
from vllm.v1.executor.replica_reports import ReplicaReports, Report
from vllm.v1.worker.worker import Worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forking"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="workers over gloo"),
]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MultiprocExecutor]]:
    use_quick_clock(monkeypatch)
    end_soon(monkeypatch)
    with executors(tensor_parallel_size=2) as make:
        yield make


def meet(worker: Worker, late: Callable[[], None] | None = None) -> int:
    if worker.rank == 1 and late is not None:
        late()
    get_world_group().barrier()
    return worker.rank


LATE = {
    lie_down: r"the worker of rank 1 does not go on, for 3 s: .*rank 1 .*says nothing any more",
    sleep_long: r"no worker goes on, for 3 s: .*rank 1 is in no collective, at .*sleep_long < ",
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


def test_a_rank_that_others_do_not_wait_for_in_a_collective(start: Any) -> None:
    """It may wait for something else, although they have answered."""
    executor = start()
    assert (
        executor.collective_rpc(lambda worker: time.sleep(2 * LIMIT_S * worker.rank)) == [None] * 2
    )


def test_who_calls_may_say_that_it_takes_long(start: Any) -> None:
    executor = start()
    late = lambda: time.sleep(2 * LIMIT_S)  # noqa: E731
    assert executor.collective_rpc(meet, timeout=10 * LIMIT_S, args=(late,)) == [0, 1]


def test_calls_that_wait_for_something_else_are_no_hang(start: Any) -> None:
    """Nobody waits for another rank."""
    executor = start()
    assert executor.collective_rpc(lambda worker: time.sleep(2 * LIMIT_S)) == [None, None]


IN_SUM = Beat("all-reduce of ranks 0, 1", False, 0.0, "here")
IDLE = Beat(NEXT_MESSAGE, True, 0.0, "")
OUTSIDE = Beat(None, False, 0.0, "there")


def watch_of(
    *beats: Beat | None, sees_work: bool | None = False, patience_s: float | None = 0.0
) -> HangWatch:
    watch = HangWatch(
        range(len(beats)), lambda: patience_s, lambda rank: sees_work, lambda error: None
    )
    for rank, beat in enumerate(beats):
        if beat is not None:
            watch.take(rank, beat)
    return watch


def looks(watch: HangWatch, seconds: int, beats: Sequence[Beat | None] = ()) -> str | None:
    """What is found by a look per second; `beats`: those that go on, and stay where they are."""
    for second in range(1, seconds + 1):
        for rank, beat in enumerate(beats):
            if beat is not None:
                watch.take(rank, replace(beat, still_s=second - 1.0))
        if (found := watch.look(1.0)) is not None:
            return f"{second} s: {found}"
    return None


def test_a_collective_that_all_are_in_gets_more_time() -> None:
    """And no rank that a slow network keeps in it is blamed before."""
    found = looks(watch_of(IN_SUM, IN_SUM), 200, (IN_SUM, IN_SUM))
    assert (found or "").startswith("120 s: no worker goes on, for 120 s: rank 0 waits for all-r")


def test_a_collective_that_one_rank_does_not_come_to() -> None:
    for late in (OUTSIDE, IDLE):
        found = looks(watch_of(IN_SUM, late), 200, (IN_SUM, late))
        assert (found or "").startswith("20 s: no worker goes on, for 20 s: rank 0 waits for")


def test_a_collective_that_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = looks(watch_of(IN_SUM, OUTSIDE, patience_s=40.0), 200, (IN_SUM, OUTSIDE))
    assert (found or "").startswith("40 s: no worker goes on")
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "60")
    found = looks(watch_of(IN_SUM, OUTSIDE), 200, (IN_SUM, OUTSIDE))
    assert (found or "").startswith("60 s: no worker goes on")


def test_a_rank_without_beats_that_does_nothing() -> None:
    found = looks(watch_of(IN_SUM, OUTSIDE), 200, (IN_SUM, None)) or ""
    assert found.startswith("20 s: the worker of rank 1 does not go on, for 20 s: ")
    assert "rank 1 is in no collective, and says nothing any more for 20 s, at there" in found
    assert looks(watch_of(IDLE, IDLE, patience_s=None), 200) is None  # nobody waits for it


def test_a_rank_without_beats_that_is_seen_to_work() -> None:
    """Whatever it did, and for how long, when its last beat came."""
    for last in (OUTSIDE, replace(IDLE, still_s=1000.0), None):
        assert looks(watch_of(IN_SUM, last, sees_work=True), 200, (IN_SUM, None)) is None


def test_a_rank_without_beats_that_cannot_be_seen() -> None:
    """It may be busy."""
    found = looks(watch_of(IN_SUM, OUTSIDE, sees_work=None), 200, (IN_SUM, None)) or ""
    assert found.startswith("120 s: the worker of rank 1 does not go on, for 120 s: ")


def test_a_watch_that_fails_says_so() -> None:
    def patience_s() -> float | None:
        raise RuntimeError("no answer")

    ends: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    watch = HangWatch(range(1), patience_s, lambda rank: True, ends.put)
    watch.start()
    assert "no answer" in str(ends.get(timeout=10))
    watch.stop()


def test_a_replica_has_reported_when_its_watch_has_begun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be stopped right after."""
    monkeypatch.setattr(HangWatch, "_run", lambda self: None)
    own = ReplicaReports(str(tmp_path), 1, 2)
    HangWatch(range(1), lambda: None, lambda rank: True, lambda error: None, own).start()
    first = ReplicaReports(str(tmp_path), 0, 2)
    assert first.exchange(NOTHING, 0.0)[1].places == ["replica 1: rank 0 has said nothing so far"]


NOTHING = Report(0.0, 0.0, [], None)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_replica_that_reports_nothing_any_more(tmp_path: Path, is_stopped: bool) -> None:
    """One whose process works goes on."""
    command = [sys.executable, "-c", "import time\nprint(flush=True)\nwhile True: time.time()"]
    first = ReplicaReports(str(tmp_path), 0, 2)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            if is_stopped:
                process.send_signal(signal.SIGSTOP)
                wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
            content = {"at_s": 1.0, "pid": process.pid, **asdict(replace(NOTHING, still_s=50.0))}
            (tmp_path / "workers-1.json").write_text(json.dumps(content))
            reports = [first.exchange(NOTHING, 1.0)[1] for _ in range(21)]
        finally:
            process.kill()
    if is_stopped:
        assert reports[-1].silent_s == 20.0 and reports[-1].still_s == 70.0
    else:
        assert max(one.silent_s for one in reports) <= 3.0
        assert reports[-1].still_s <= 3.0


def test_reports_without_their_directory(tmp_path: Path) -> None:
    """The server ends: nobody is to blame for what is not there."""
    watch = HangWatch(
        range(1),
        lambda: 0.0,
        lambda rank: True,
        lambda error: None,
        ReplicaReports(str(tmp_path / "gone"), 0, 2),
    )
    assert looks(watch, 200, (IN_SUM,)) is None


def test_the_pulse_of_a_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that spins, as one does that waits for a device, is not its work."""
    use_quick_clock(monkeypatch)
    beats: dict[bool, list[Beat]] = {True: [], False: []}
    stopped = threading.Event()

    def spin() -> None:
        while not stopped.is_set():
            hashlib.sha256(bytes(2**20))

    def be_still() -> None:
        pulses = [Pulse(found.append, alone) for alone, found in beats.items()]
        stopped.wait()
        for pulse in pulses:
            pulse.stop()

    threads = [threading.Thread(target=one) for one in (spin, be_still)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(beats[True]) > 4 and len(beats[False]) > 4)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert max(beat.still_s for beat in beats[True]) >= 2 * pulse_module.BEAT_S
    assert min(beat.still_s for beat in beats[False][2:]) == 0.0
    assert " be_still < " in beats[True][-1].frames


_COLLECTS = """
import gc, threading, time
from vllm.v1.executor.pulse import frames_of
gc.callbacks.append(lambda phase, info: time.sleep(0.0005))
gc.set_threshold(3)
for _ in range(10):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
def look():
    for _ in range(300):
        found = frames_of(threading.main_thread().ident)
        assert "<module>" in found or "join" in found, found
        time.sleep(0.0001)
threads = [threading.Thread(target=look, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("end")
"""


def test_threads_that_look_where_others_are_while_garbage_is_collected() -> None:
    """A collection lets other threads run, which look as well."""
    done = subprocess.run(
        [sys.executable, "-c", _COLLECTS], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "end\n", done.stderr


def test_a_shutdown_with_a_rank_that_hangs(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """It is killed after the time that workers get to stop."""
    monkeypatch.setattr(stationed, "STOP_S", 1.0)
    executor = start()
    workers = processes_of(executor)
    workers[1].suspend()
    began = time.monotonic()
    executor.shutdown()
    assert gone(workers) and time.monotonic() - began < END_S
