# SPDX-License-Identifier: Apache-2.0
"""The engine core: scheduler and executor, one step at a time. It knows no text and no sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import EventBatch
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.model_executor.placements import Placement
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RequestError,
    RequestFailure,
    StopRequest,
)
from vllm.v1.engine.core_memory import CoreMemory
from vllm.v1.engine.core_parts import (
    create_block_hasher,
    create_event_publisher,
    create_scheduler,
)
from vllm.v1.engine.core_placements import CorePlacements
from vllm.v1.engine.expert_rearrangement import ExpertRearrangement
from vllm.v1.engine.joint_steps import JointSteps, meet_replicas
from vllm.v1.engine.late_captures import LateCaptures
from vllm.v1.engine.placements import PlacementChange
from vllm.v1.engine.replicas import decided
from vllm.v1.engine.sleep import ASLEEP, CoreSleep
from vllm.v1.engine.steps_in_flight import StepsInFlight
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.station import failure_of
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.masks import StepMasks

#: longest wait for transfers before sleeping, and the pause between looking
_DRAIN_S = 10.0
_TICK_S = 0.001

logger = init_logger(__name__)

#: worker methods after which all state computed before is of other weights
_NEW_WEIGHTS = frozenset({"reload_weights"})


class EngineCore:
    """Runs requests until they are done.

    Up to `executor.max_concurrent_batches` steps are in flight, so with asynchronous scheduling
    step n + 1 is scheduled while step n runs.
    """

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool = True
    ) -> None:
        self.vllm_config = vllm_config
        self.executor = executor_class(vllm_config)
        #: results that a call had to have taken
        self._taken_early: deque[dict[int, EngineCoreOutputs]] = deque()
        self._last_step_computed = False
        self._last_step_paused = False
        self._state_arrived = False
        #: with replicas that share experts
        self.joint: JointSteps | None = None
        try:
            if vllm_config.parallel_config.replicas_share_experts:
                self.joint = meet_replicas(
                    vllm_config, self.executor.step_timeout_s, self.executor.check_health
                )
            self.executor.check_experts()
            memory = CoreMemory(vllm_config, self.executor)
            kv_cache_config = memory.allocate(self.joint)
            self.scheduler = create_scheduler(
                vllm_config, self.executor, kv_cache_config, log_stats
            )
            self._event_publisher = create_event_publisher(vllm_config)
        except BaseException as error:
            self.executor.shutdown(failure_of(error))
            if self.joint is not None:
                self.joint.close()
            raise
        self._in_flight = StepsInFlight(self.executor, self.joint)
        self._widths = vllm_config.step_widths
        self._block_hasher = create_block_hasher(vllm_config, self.scheduler)
        self._grammars = StructuredOutputManager(vllm_config)
        self.sleeping = CoreSleep(vllm_config, self.scheduler, self.executor, self._drain)
        self.late_captures = LateCaptures(vllm_config, self.executor)
        self._experts = ExpertRearrangement(vllm_config.parallel_config, self.executor)
        self._placements = CorePlacements(
            vllm_config,
            self.scheduler,
            self.executor,
            self._drain,
            memory,
            kv_cache_config,
            self.late_captures,
        )
        self._utilities: dict[str, Callable[..., Any]] = {
            "change_placement": self.change_placement,
            "take_back_placement": self._placements.take_back,
            "overlap_placement": self.overlap_placement,
            "admit_placement": self.admit_placement,
            "own_placement": self._placements.own,
            "collective_rpc": self.collective_rpc,
            "decisions": lambda: [decided(vllm_config)],
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "check_health": self.executor.check_health,
            "sleep": self.sleeping.sleep,
            "wake_up": self.sleeping.wake_up,
        }

    # ---- requests ------------------------------------------------------------------------------

    def receive(self, request: EngineCoreRequest) -> Request | EngineCoreOutput:
        """Build the core's request (hashes the prompt's blocks), or its last message if it cannot
        be made; may run on another thread."""
        try:
            made = Request.from_engine_core_request(request, self._block_hasher)
            made.grammar = self._grammars.start(request.sampling_params)
            return made
        except Exception as error:
            logger.exception("request %s cannot be received", request.request_id)
            return _refusal(request.request_id, RequestFailure.of("receive", error))

    def add_request(self, request: Request | EngineCoreOutput) -> EngineCoreOutput | None:
        """Queue what `receive` gave; returns the request's last message instead if it is refused:
        it could not be made, its id is still in use, the engine sleeps, or a connector fails."""
        if isinstance(request, EngineCoreOutput):
            return request
        try:
            if self.sleeping.is_sleeping:
                raise ValueError(ASLEEP)
            self._placements.assign(request)
            self.scheduler.add_request(request)
        except ValueError as error:
            logger.error("%s", error)
            return _refusal(request.request_id, str(error))
        except Exception as error:
            logger.exception("request %s cannot be received", request.request_id)
            return _refusal(request.request_id, RequestFailure.of("receive", error))
        return None

    def abort_requests(self, request_ids: list[str] | None) -> None:
        """None: all of them."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def stop_requests(self, stops: list[StopRequest]) -> None:
        """End requests at a stop string; each gets its last message from the scheduler."""
        for stop in stops:
            self.scheduler.stop_request(stop.request_id, stop.num_output_tokens)

    def abort_client(self, client_index: int) -> None:
        """Abort all requests of a client that is gone."""
        self.abort_requests(self.scheduler.request_ids_of(client_index))

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to wait for."""
        waits = self._in_flight or self._taken_early or self._experts.is_due
        return bool(waits) or self._has_next_step()

    def _has_next_step(self) -> bool:
        """Whether there is something to schedule here, or a step of another replica to join."""
        if self.scheduler.has_requests():
            return True
        return self.joint is not None and self.joint.is_called and not self.sleeping.is_sleeping

    def use_idle_time(self) -> bool:
        """With nothing to do: do a part of what start-up left; False when nothing is left."""
        if not self.late_captures.pending or self.sleeping.is_sleeping:
            return False
        self.late_captures.capture_one()
        return True

    @property
    def only_waits(self) -> bool:
        """Whether the last step computed nothing, did not wait itself, and no state that a request
        waits for came: what is left are transfers to wait for."""
        return self._nothing_happens and not self._last_step_paused

    @property
    def _nothing_happens(self) -> bool:
        return not (self._last_step_computed or self._in_flight or self._state_arrived)

    # ---- the loop ------------------------------------------------------------------------------

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Launch the next step; once enough are in flight, take the oldest one's results."""
        if self.late_captures.is_due:
            self._send_all_masks()
            self.late_captures.capture_one()
        if self._taken_early:
            return self._taken_early.popleft()
        if self._placements.any_waits:
            self._placements.bring_in()
        if not self._in_flight:
            self._experts.run()
        self._last_step_paused = False
        may_launch = self._in_flight.has_room and not self._experts.is_due
        if may_launch and self._has_next_step():
            output = self.scheduler.schedule()
            if self.joint is not None:
                output.joint = self.joint.join(output.shape(self._widths))
            self._last_step_paused = self._may_pause(output)
            if self._last_step_paused:
                output.pause_s = _TICK_S
            self._in_flight.launch(output, self._masks_of(output))
            self._in_flight.send_masks()
            self._last_step_computed = (
                output.total_num_scheduled_tokens > 0 or output.joint is not None
            )
            if self._last_step_computed:
                self._experts.count_step()
                if self._in_flight.has_room:
                    return {}
        if not self._in_flight or self._in_flight.is_called_before_result():
            return {}
        return self._take_oldest()

    def _may_pause(self, output: SchedulerOutput) -> bool:
        """Whether nobody needs a step's result before a transfer of its connector has ended."""
        has_work = output.total_num_scheduled_tokens or output.joint is not None
        return not has_work and self._nothing_happens and output.kv_connector_metadata is not None

    def _take_oldest(self) -> dict[int, EngineCoreOutputs]:
        """Wait for the oldest step in flight; what it produced, for each client."""
        output, result = self._in_flight.take_oldest()
        transfers = result.kv_connector_output
        self._state_arrived = transfers is not None and bool(transfers.finished_recving)
        produced = self.scheduler.update_from_output(output, result)
        self._publish_events()
        self._in_flight.send_masks()
        return produced

    def _publish_events(self) -> None:
        if self._event_publisher is None:
            return
        events = self.scheduler.take_events()
        if events:
            self._event_publisher.publish(EventBatch(time.time(), events))

    def _send_all_masks(self) -> None:
        """Take results until no step in flight waits for masks: before its own, a worker answers no
        call."""
        while self._in_flight.any_waits_for_masks:
            self._taken_early.append(self._take_oldest())

    def _masks_of(self, output: SchedulerOutput) -> StepMasks | None:
        """Of a step in which requests that follow a grammar sample."""
        if not output.masked_req_ids:
            return None
        constrained = self.scheduler.constrained_requests(output)
        drafts = output.scheduled_spec_decode_tokens
        return StepMasks(constrained, [len(drafts.get(one, ())) for one in output.masked_req_ids])

    def _drain(self) -> None:
        """Before a sleep: tell the workers what ended and wait for transfers of ended requests.
        What the steps say goes to the clients with the next ones."""
        deadline = time.monotonic() + _DRAIN_S
        said: list[dict[int, EngineCoreOutputs]] = []
        while self.has_work():
            if time.monotonic() > deadline:
                raise RuntimeError("the engine cannot sleep: transfers of finished requests go on")
            said.append(self.step())
            if self.only_waits:
                time.sleep(_TICK_S)
        self._taken_early.extend(filter(None, said))

    # ---- utilities -----------------------------------------------------------------------------

    def call_utility(self, method: str, args: tuple[Any, ...]) -> Any:
        """Run a named utility; ValueError for an unknown one."""
        if method not in self._utilities:
            raise ValueError(
                f"the engine has no utility {method!r}; known: {', '.join(self._utilities)}"
            )
        result = self._utilities[method](*args)
        self._publish_events()
        return result

    def change_placement(self, placement: Placement) -> PlacementChange:
        """Use other mixers of a supernet; see `CorePlacements.change`."""
        if self.sleeping.is_sleeping:
            raise VLLMValidationError(ASLEEP, "placement")
        return self._placements.change(placement)

    def overlap_placement(self, placement: Placement) -> PlacementChange:
        """Use other mixers of a supernet from here on; see `CorePlacements.overlap`."""
        if self.sleeping.is_sleeping:
            raise VLLMValidationError(ASLEEP, "placement")
        return self._placements.overlap(placement)

    def admit_placement(self, placement: Placement) -> str:
        """See `CorePlacements.admit`."""
        if self.sleeping.is_sleeping:
            raise VLLMValidationError(ASLEEP, "placement")
        return self._placements.admit(placement)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method; one result per worker. Once it has replaced weights, maybe only
        some before it failed, requests that have started compute all their tokens again and no
        cached prefix is found any more."""
        replaces = isinstance(method, str) and method in _NEW_WEIGHTS
        if replaces and "weights" in self.sleeping.asleep:
            raise VLLMValidationError(f"{method}: the weights sleep; wake them up first", "method")
        if replaces and self.joint is not None:
            # No step is of one replica's old experts and another one's new ones.
            self._experts.run()
            self.joint.meet(self._join_with_padding)
        self._send_all_masks()
        if not replaces:
            return self.executor.collective_rpc(method, timeout, tuple(args), kwargs)
        try:
            results = self.executor.collective_rpc(method, timeout, tuple(args), kwargs)
        finally:
            forgotten = self.scheduler.reset_prefix_cache(True, True)
        if not forgotten:
            raise RuntimeError(
                f"{method}: the weights are new, but a connector keeps state of the old ones; "
                "reset the prefix cache again, with reset_connector"
            )
        return results

    def _join_with_padding(self) -> None:
        """Take a step of another replica without any of this one's requests."""
        assert self.joint is not None
        output = SchedulerOutput.make_empty()
        output.unscheduled = True
        output.joint = self.joint.join(output.shape(self._widths))
        self.executor.execute_model(output).result(self.executor.step_timeout_s)
        if output.joint is not None:
            self._experts.count_step()
            self._experts.run()

    def shutdown(self, reason: str | None = None) -> None:
        """Stop scheduler, connector and workers; safe to call twice. `reason`: what has failed."""
        self._grammars.shutdown()
        self.scheduler.shutdown()
        if self._event_publisher is not None:
            self._event_publisher.shutdown()
        self.executor.shutdown(reason)
        if self.joint is not None:
            self.joint.close()


def _refusal(request_id: str, error: RequestError) -> EngineCoreOutput:
    """The only message of a request that never ran."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)
