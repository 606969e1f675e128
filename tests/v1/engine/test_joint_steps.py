# SPDX-License-Identifier: Apache-2.0
"""What cores say to each other about steps that they take together; threads stand for cores."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.engine.joint_steps import JointSteps, ReplicaLostError
from vllm.v1.engine.replica_mesh import connect_replicas

pytestmark = pytest.mark.slow

NOTHING = StepShape(0, 0, 0, True)
DECODES = StepShape(3, 3, 0, True)
PREFILL = StepShape(40, 1, 1, False)
TIMEOUT_S = 30.0


def healthy() -> None:
    """Nothing is known that ends a wait."""


def connect(folder: str, rank: int, size: int, timeout_s: float) -> dict[int, socket.socket]:
    return connect_replicas(folder, rank, size, timeout_s, healthy)


def met(folder: Path, size: int, timeout_s: float = TIMEOUT_S) -> list[JointSteps]:
    with ThreadPoolExecutor(size) as pool:
        links = list(pool.map(lambda i: connect(str(folder), i, size, 30.0), range(size)))
    assert os.listdir(folder) == []
    return [JointSteps(one, timeout_s, healthy) for one in links]


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[Callable[..., list[JointSteps]]]:
    """Makes so many, that hear each other; they are closed at the end."""
    made: list[JointSteps] = []

    def make(size: int = 3, timeout_s: float = TIMEOUT_S) -> list[JointSteps]:
        found = met(tmp_path, size, timeout_s)
        for one in found:
            one.begin()
        made.extend(found)
        return found

    yield make
    for one in made:
        one.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.001)


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_all_launch_what_covers_everything(cores: Callable[..., list[JointSteps]]) -> None:
    first, second, third = cores()
    for own in ((DECODES, PREFILL, NOTHING), (NOTHING, NOTHING, DECODES), (PREFILL,) * 3):
        expected = StepShape.covering(own)
        calls = []
        for core, shape in zip((first, second, third), own, strict=True):
            if not shape.num_tokens:
                calls.append(lambda core=core: (until(lambda: core.is_called), core.join(NOTHING)))
            else:
                calls.append(lambda core=core, shape=shape: (None, core.join(shape)))
        assert [found for _, found in together(*calls)] == [expected] * 3
    assert not any(core.is_called for core in (first, second, third))


def test_nobody_without_tokens_waits(cores: Callable[..., list[JointSteps]]) -> None:
    for core in cores():
        assert core.join(NOTHING) is None and not core.is_called


def test_a_core_is_woken_by_the_first_offer(cores: Callable[..., list[JointSteps]]) -> None:
    first, second = cores(2)
    woken = threading.Event()
    second.set_wake(lambda error: woken.set() if error is None else None)

    def answer() -> StepShape | None:
        assert woken.wait(TIMEOUT_S) and second.is_called
        return second.join(NOTHING)

    assert together(lambda: first.join(DECODES), answer) == [DECODES, DECODES]


def test_waiting_for_a_result_ends_with_a_call(cores: Callable[..., list[JointSteps]]) -> None:
    first, second = cores(2)
    done: Future[int] = Future()
    done.set_result(1)
    assert not first.wait(done, TIMEOUT_S, for_calls=True)
    result: Future[int] = Future()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(first.wait, result, TIMEOUT_S, True)
        step = pool.submit(second.join, DECODES)
        assert waiting.result() and not result.done()
        # Those who do not wait for calls get the result alone.
        waiting = pool.submit(first.wait, result, TIMEOUT_S)
        time.sleep(0.05)
        assert not waiting.done()
        result.set_result(1)
        assert not waiting.result()
        assert first.join(NOTHING) == step.result() == DECODES


def test_a_replica_that_does_not_come_is_named(cores: Callable[..., list[JointSteps]]) -> None:
    first, second, _ = cores(timeout_s=0.3)
    with pytest.raises(TimeoutError, match="replicas 1, 2 did not come to a step"):
        first.join(DECODES)
    until(lambda: second.is_called)
    words = "replica 2 did not come to a step that all take together within 0.3 s"
    with pytest.raises(TimeoutError, match=words):
        second.join(DECODES)


def test_the_end_of_a_replica_ends_all_that_wait(cores: Callable[..., list[JointSteps]]) -> None:
    first, second, third = cores()
    errors: list[Exception | None] = []
    third.set_wake(errors.append)
    result: Future[int] = Future()
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(first.join, DECODES)
        waiting = pool.submit(third.wait, result, TIMEOUT_S)
        time.sleep(0.05)
        for link in second._links.values():
            link.shutdown(2)
        for future in (joining, waiting):
            with pytest.raises(ReplicaLostError, match="replica 1 ended"):
                future.result()
    until(lambda: any(isinstance(one, ReplicaLostError) for one in errors))
    # A collective that broke off is no cause.
    assert str(third.cause_of(RuntimeError("broken pipe"))).startswith("replica 1 ended")


def test_an_error_of_ones_own_is_its_cause(cores: Callable[..., list[JointSteps]]) -> None:
    first, _ = cores(2)
    error = RuntimeError("out of memory")
    assert first.cause_of(error) is error


def test_the_first_that_failed_is_the_cause(cores: Callable[..., list[JointSteps]]) -> None:
    first, second, third = cores()
    errors = [RuntimeError(f"{i}") for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = []
        for core, error in ((second, errors[1]), (first, errors[0]), (third, errors[2])):
            found.append(pool.submit(core.cause_of, error))
            until(lambda: all(1 in other._failed_s for other in (first, third)))
        own, *others = [future.result() for future in found]
    assert own is errors[1]
    assert all(str(one).startswith("replica 1 ended") for one in others)


def test_a_core_that_hangs_is_silent(tmp_path: Path) -> None:
    first, second, third = met(tmp_path, 3)
    first.begin()
    third.begin()
    assert first.silent() == [1]
    second.begin()
    assert first.silent() == []
    for core in (first, second, third):
        core.close()


def test_a_core_that_leaves_joins_until_all_leave(
    cores: Callable[..., list[JointSteps]],
) -> None:
    first, second = cores(2)
    first.leave()
    until(lambda: second.all_leave)
    assert not first.all_leave

    def answer() -> StepShape | None:
        until(lambda: first.is_called)
        return first.join(NOTHING)

    assert together(lambda: second.join(DECODES), answer) == [DECODES, DECODES]
    second.leave()
    until(lambda: first.all_leave)
    first.close()
    until(lambda: bool(second._gone))
    done: Future[int] = Future()
    done.set_result(1)
    assert not second.wait(done, 1.0), "who has left is not missed"
    with pytest.raises(ReplicaLostError, match="replica 0 ended"):
        second.join(DECODES)


def test_replicas_meet_while_one_still_takes_steps(
    cores: Callable[..., list[JointSteps]],
) -> None:
    first, second = cores(2)
    padding: list[StepShape | None] = []

    def busy() -> None:
        for _ in range(3):
            second.join(DECODES)
        second.meet(lambda: pytest.fail("nobody calls"))

    together(lambda: first.meet(lambda: padding.append(first.join(NOTHING))), busy)
    assert padding == [DECODES] * 3
    together(lambda: first.meet(lambda: None), lambda: second.meet(lambda: None))


def test_who_does_not_meet_is_named(cores: Callable[..., list[JointSteps]]) -> None:
    first, _ = cores(2, timeout_s=0.2)
    with pytest.raises(TimeoutError, match="replica 1 did not come within"):
        first.meet(lambda: None)


def test_the_least_number_of_all(tmp_path: Path) -> None:
    found = met(tmp_path, 3)
    numbers = (1 << 40, 7, 9)
    calls = [lambda core=core, n=n: core.least(n) for core, n in zip(found, numbers, strict=True)]
    assert together(*calls) == [7] * 3
    found[0].close()
    with pytest.raises(ReplicaLostError, match="replica 0 ended"):
        found[1].least(1)
    for core in found[1:]:
        core.close()


def test_replicas_that_do_not_start_are_named(tmp_path: Path) -> None:
    for rank, missing in ((0, "replicas 1, 2"), (2, "replicas 0, 1")):
        with pytest.raises(TimeoutError, match=f"{missing} did not start within 0.2 s"):
            connect(str(tmp_path), rank, 3, 0.2)
    assert os.listdir(tmp_path) == []
