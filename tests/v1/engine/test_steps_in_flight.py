# SPDX-License-Identifier: Apache-2.0
"""Launched steps: which reach the executor, whose masks are sent, and how waiting ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tests.v1.engine.fakes import FakeExecutor, make_vllm_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.steps_in_flight import StepsInFlight
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.structured_output.mask_words import FilledMasks

RESULT = ModelRunnerOutput(req_ids=["a"], sampled_token_ids=[[5]])


class Futures(FakeExecutor):
    """A step's result is set by the test."""

    step_timeout_s = 0.05

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.results: list[Future[ModelRunnerOutput]] = []
        self.sent: list[int] = []

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.results.append(Future())
        return self.results[-1]

    def send_token_masks(self, masks: FilledMasks) -> None:
        self.sent.append(int(masks.words[0, 0]))


class Masks:
    """Of step number `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def filled(self) -> FilledMasks:
        return FilledMasks(np.array([[self.step]]), [1])


class Replicas:
    """Others, of which `silent_ranks` hang and which call for the next step if `calls`."""

    def __init__(self, calls: bool = False, *silent_ranks: int) -> None:
        self.calls, self.silent_ranks = calls, list(silent_ranks)

    def wait(self, result: Future[Any], timeout_s: float, for_calls: bool = False) -> bool:
        return for_calls and self.calls

    def silent(self) -> list[int]:
        return self.silent_ranks


@pytest.fixture
def executor() -> Iterator[Futures]:
    made = Futures(make_vllm_config(async_scheduling=True))
    yield made
    made.shutdown()


def tokens() -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.total_num_scheduled_tokens = 1
    return output


def test_results_come_in_the_order_of_launches(executor: Futures) -> None:
    steps = StepsInFlight(executor, None)
    outputs = [tokens(), tokens()]
    assert not steps and steps.has_room
    for output in outputs:
        steps.launch(output, None)
    assert len(steps) == 2 and not steps.has_room
    for result in reversed(executor.results):
        result.set_result(RESULT)
    assert [steps.take_oldest()[0] for _ in outputs] == outputs
    assert not steps


def test_workers_hear_only_of_steps_that_concern_them(executor: Futures) -> None:
    steps = StepsInFlight(executor, None)
    steps.launch(SchedulerOutput.make_empty(), None)
    assert steps.take_oldest()[1] is EMPTY_MODEL_RUNNER_OUTPUT and not executor.results
    ended = SchedulerOutput.make_empty()
    ended.finished_req_ids = {"a"}
    steps.launch(ended, None)
    assert len(executor.results) == 1


def test_masks_wait_until_their_step_is_the_oldest(executor: Futures) -> None:
    steps = StepsInFlight(executor, None)
    masks: Any = [Masks(0), Masks(1)]
    for one in masks:
        steps.launch(tokens(), one)
        steps.send_masks()
    assert executor.sent == [0] and steps.any_waits_for_masks
    executor.results[0].set_result(RESULT)
    steps.take_oldest()
    for _ in range(2):
        steps.send_masks()
    assert executor.sent == [0, 1] and not steps.any_waits_for_masks


def test_a_call_comes_before_a_result_only_with_room(executor: Futures) -> None:
    alone, joint = StepsInFlight(executor, None), Replicas(calls=True)
    shared = StepsInFlight(executor, joint)  # type: ignore[arg-type]
    for steps in (alone, shared):
        steps.launch(tokens(), None)
    assert not alone.is_called_before_result() and shared.is_called_before_result()
    joint.calls = False
    assert not shared.is_called_before_result()
    joint.calls = True
    shared.launch(tokens(), None)
    assert not shared.is_called_before_result()


@pytest.mark.parametrize("silent", [False, True])
def test_a_step_that_takes_too_long_ends_the_engine(executor: Futures, silent: bool) -> None:
    joint: Any = Replicas(False, 2) if silent else None
    steps = StepsInFlight(executor, joint)
    steps.launch(tokens(), None)
    with pytest.raises(TimeoutError, match="no result after 0.05 s") as raised:
        steps.take_oldest()
    assert str(raised.value).startswith("replica 2 did not answer: ") == silent


def test_a_timeout_in_a_step_is_its_own(executor: Futures) -> None:
    steps = StepsInFlight(executor, None)
    steps.launch(tokens(), None)
    executor.results[0].set_exception(TimeoutError("of a store"))
    with pytest.raises(TimeoutError, match="^of a store$"):
        steps.take_oldest()


def test_a_result_that_is_late_but_in_time_is_taken(executor: Futures) -> None:
    steps = StepsInFlight(executor, None)
    steps.launch(tokens(), None)
    timer = threading.Timer(0.01, executor.results[0].set_result, [RESULT])
    timer.start()
    assert steps.take_oldest()[1] is RESULT
    timer.join()
