# SPDX-License-Identifier: Apache-2.0
"""When experts move: after which steps, and that no step is in flight then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest

from tests.v1.engine.fakes import FakeExecutor, expected_tokens, make_vllm_config
from vllm.config import EPLBConfig, ParallelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.expert_rearrangement import ExpertRearrangement
from vllm.v1.outputs import ModelRunnerOutput

BEGIN, REARRANGE = "begin_expert_window", "rearrange_experts"


class Workers:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def collective_rpc(self, method: str) -> list[dict[str, list[float]]]:
        self.asked.append(method)
        return [{"a": [0.5, 0.75]}, {"a": [0.5, 0.75], "b": [0.75, 1.0]}]


def parallel(enabled: bool = True, rank: int = 0, **config: Any) -> ParallelConfig:
    found = ParallelConfig(
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        enable_eplb=enabled,
        eplb_config=EPLBConfig(**config) if enabled else EPLBConfig(),
    )
    found.data_parallel_rank = rank
    return found


def asked_by_step(config: ParallelConfig, num_steps: int) -> dict[int, list[str]]:
    workers: Any = Workers()
    experts = ExpertRearrangement(config, workers)
    found = {}
    for step in range(1, num_steps + 1):
        experts.count_step()
        due = experts.is_due
        experts.run()
        assert bool(workers.asked) == due and not experts.is_due
        if workers.asked:
            found[step], workers.asked = workers.asked, []
    return found


@pytest.mark.parametrize(
    ("window", "interval", "expected"),
    [
        (3, 5, {2: [BEGIN], 5: [REARRANGE], 7: [BEGIN], 10: [REARRANGE]}),
        (5, 5, {5: [REARRANGE, BEGIN], 10: [REARRANGE, BEGIN]}),
        (1, 1, {step: [REARRANGE, BEGIN] for step in range(1, 12)}),
        (1, 2, {step: [REARRANGE if step % 2 == 0 else BEGIN] for step in range(1, 12)}),
    ],
)
def test_steps_that_decide_and_steps_after_which_experts_move(
    window: int, interval: int, expected: dict[int, list[str]]
) -> None:
    assert asked_by_step(parallel(window_size=window, step_interval=interval), 11) == expected


def test_without_the_flag_nobody_is_asked() -> None:
    assert asked_by_step(parallel(enabled=False), 6001) == {}


def test_what_is_due_is_done_once() -> None:
    workers: Any = Workers()
    experts = ExpertRearrangement(parallel(window_size=1, step_interval=1), workers)
    experts.run()
    assert not workers.asked
    experts.count_step()
    experts.run()
    experts.run()
    assert workers.asked == [REARRANGE, BEGIN]


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_the_log_tells_the_balancedness(
    rank: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all layers, once for all replicas."""
    config = parallel(rank=rank, window_size=1, step_interval=1, log_balancedness=True)
    with caplog.at_level(logging.INFO):
        asked_by_step(config, 1)
    found = [one.message for one in caplog.records if "balancedness" in one.message]
    assert found == ["experts rearranged: balancedness 0.625 before, 0.875 after"] * lines


def test_a_window_ends_before_the_next_begins() -> None:
    with pytest.raises(VLLMValidationError, match="window_size 6 is more than step_interval 5"):
        EPLBConfig(window_size=6, step_interval=5)


class Experts(FakeExecutor):
    """Notes after which step it was called, and how many had no result."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.launched: list[Future[ModelRunnerOutput]] = []
        self.called: list[tuple[str, int, int]] = []

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.launched.append(super().execute_model(scheduler_output))
        return self.launched[-1]

    def _note(self, method: str) -> None:
        waiting = sum(not one.done() for one in self.launched)
        self.called.append((method, len(self.launched), waiting))

    def begin_expert_window(self) -> None:
        self._note(BEGIN)

    def rearrange_experts(self) -> dict[str, list[float]]:
        self._note(REARRANGE)
        return {}

    def reload_weights(self) -> None:
        self._note("reload_weights")


def core_of(**options: Any) -> tuple[EngineCore, Experts]:
    config = make_vllm_config(**options)
    config.parallel_config = parallel(window_size=2, step_interval=4)
    core = EngineCore(config, Experts)
    assert isinstance(core.executor, Experts)
    prompt = [5, 6, 7]
    params = SamplingParams(ignore_eos=True, max_tokens=8)
    core.add_request(core.receive(EngineCoreRequest("a", prompt, params, 0.0)))
    return core, core.executor


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_step_is_in_flight(async_scheduling: bool) -> None:
    core, executor = core_of(async_scheduling=async_scheduling)
    tokens = []
    while core.has_work():
        for message in core.step().values():
            tokens += [token for one in message.outputs for token in one.new_token_ids]
    assert tokens == expected_tokens([5, 6, 7], SamplingParams(max_tokens=8))
    expected = [(BEGIN, 2, 0), (REARRANGE, 4, 0), (BEGIN, 6, 0), (REARRANGE, 8, 0)]
    assert executor.called == expected, "the last one without any request"
    core.shutdown()


class Meeting:
    """In the place of other replicas: they need two more steps before they meet this one."""

    def __init__(self, executor: Experts) -> None:
        self._executor = executor
        self.num_calls = 0

    @property
    def is_called(self) -> bool:
        return self.num_calls > 0

    def join(self, own: StepShape) -> StepShape:
        self.num_calls -= 1
        return StepShape(max(1, own.num_tokens), 1, 0, True)

    def wait(self, result: Future[Any], timeout_s: float, for_calls: bool = False) -> bool:
        wait([result], timeout_s)
        return False

    def meet(self, join: Callable[[], None]) -> None:
        self._executor._note("meet")
        for _ in range(2):
            join()

    def close(self) -> None:
        pass


def test_a_replica_without_requests_takes_part() -> None:
    config = make_vllm_config()
    config.parallel_config = parallel(window_size=2, step_interval=2)
    core = EngineCore(config, Experts)
    executor: Any = core.executor
    meeting = Meeting(executor)
    joint: Any = meeting
    core.joint = joint
    meeting.num_calls = 2
    while core.has_work():
        core.step()
    assert executor.called == [(REARRANGE, 2, 0), (BEGIN, 2, 0)]
    core.shutdown()


def test_other_replicas_are_not_left_waiting() -> None:
    """What is due is done before this one waits for them, and in the steps that they need."""
    core, executor = core_of(async_scheduling=False)
    joint: Any = Meeting(executor)
    core.joint = joint
    core.step()
    core.step()
    assert core._experts.is_due and not executor.called
    core.collective_rpc("reload_weights")
    called = [(method, steps) for method, steps, _ in executor.called]
    expected = [(BEGIN, 2), ("meet", 2), (REARRANGE, 4), ("reload_weights", 4)]
    assert called == expected
    core.shutdown()
