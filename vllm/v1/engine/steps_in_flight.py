# SPDX-License-Identifier: Apache-2.0
"""The steps that are launched and whose results are not taken yet, oldest first."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from vllm.exceptions import HangError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.joint_steps import JointSteps
from vllm.v1.engine.replica_mesh import names
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.structured_output.masks import StepMasks


@dataclass
class StepInFlight:
    """A launched step; `masks` until they are sent, None where nobody follows a grammar."""

    output: SchedulerOutput
    result: Future[ModelRunnerOutput]
    masks: StepMasks | None


class StepsInFlight:
    """As many as `executor.max_concurrent_batches`; `joint`: of replicas that share experts."""

    def __init__(self, executor: Executor, joint: JointSteps | None) -> None:
        self._executor, self._joint = executor, joint
        self._depth = executor.max_concurrent_batches
        self._timeout_s = executor.step_timeout_s
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether another step may be launched before a result is taken."""
        return len(self._steps) < self._depth

    def launch(self, output: SchedulerOutput, masks: StepMasks | None) -> StepInFlight:
        """Queue a step at the executor, unless workers need to know nothing of it."""
        step = StepInFlight(output, self._execute(output), masks)
        self._steps.append(step)
        return step

    def _execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        if (
            output.total_num_scheduled_tokens
            or output.finished_req_ids
            or output.preempted_req_ids
            or output.kv_connector_metadata is not None
            or output.block_log
            or output.joint is not None
        ):
            return self._executor.execute_model(output)
        nothing: Future[ModelRunnerOutput] = Future()
        nothing.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
        return nothing

    @property
    def any_waits_for_masks(self) -> bool:
        return any(step.masks is not None for step in self._steps)

    def send_masks(self) -> None:
        """Of the oldest step: all tokens before it are known, so they are exact."""
        if self._steps and (masks := self._steps[0].masks) is not None:
            self._executor.send_token_masks(masks.filled())
            self._steps[0].masks = None

    def is_called_before_result(self) -> bool:
        """With room for a further step: wait for the oldest one's result, or until another replica
        needs this one to launch the next."""
        if self._joint is None or not self.has_room:
            return False
        return self._joint.wait(self._steps[0].result, self._timeout_s, for_calls=True)

    def take_oldest(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Wait for the oldest step's result. Raises what the step raised, and what ends the engine
        where there is no result in time."""
        step = self._steps.popleft()
        timeout_s = self._timeout_s
        if self._joint is not None:
            self._joint.wait(step.result, timeout_s)
            timeout_s = 0.0
        try:
            return step.output, step.result.result(timeout_s)
        except TimeoutError:
            if step.result.done():  # just now, or the error is the step's own
                return step.output, step.result.result()
            raise self._overdue() from None

    def _overdue(self) -> Exception:
        error = self._executor.overdue()
        silent = [] if self._joint is None else self._joint.silent()
        return HangError(f"{names(silent)} did not answer: {error}") if silent else error
