# SPDX-License-Identifier: Apache-2.0
"""What the engine core needs from a scheduler; `--scheduler-cls` may name another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from vllm.config import VllmConfig
from vllm.distributed.kv_events.messages import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.output import BlockOperation, SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, SchedulerStats
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class SchedulerInterface(ABC):
    """Decides what each step computes. It knows integers and block ids, never a tensor.

    `schedule()` and `update_from_output()` are called in pairs, in order; at most
    `max_steps_in_flight` steps may be scheduled whose output has not come back.
    """

    max_steps_in_flight: int

    @abstractmethod
    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, log_stats: bool = True
    ) -> None: ...

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request; `ValueError` if its id is still in use."""

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work; its tokens count as computed from here on."""

    @abstractmethod
    def constrained_requests(self, scheduler_output: SchedulerOutput) -> list[Request]:
        """The requests of `masked_req_ids`; called before the next `schedule`."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the oldest step's results; returns what to send, by client index."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> None:
        """End requests from outside (None: all of them); unknown or finished ids are ignored."""

    @abstractmethod
    def request_ids_of(self, client_index: int) -> list[str]:
        """The unfinished and finishing requests of one client of the core."""

    @abstractmethod
    def stop_request(self, request_id: str, num_output_tokens: int) -> None:
        """End a request after a token it has produced already; later ones are forgotten.

        Its last message follows with the next outputs. Unknown or finished ids are ignored.
        """

    @abstractmethod
    def has_requests(self) -> bool:
        """Whether the engine must keep stepping: work, workers to tell, transfers to await, or
        pins to end."""

    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Whether any request still has tokens to produce."""

    @abstractmethod
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; False if blocks in use stopped it.

        `reset_running_requests`: requests that have started, or wait for state of a connector,
        compute all their tokens again, so none stops it. `reset_connector`: forget what the
        connector stores, too.
        """

    def waiting_requests(self) -> list[Request]:
        """Those that no step runs, in the order in which they will start."""
        return []

    def retire_placement(self, placement: int) -> bool:
        """Forget what is cached of a placement; False, and nothing has changed, while any request
        that has started uses it. Others have to await a placement again."""
        return False

    def take_block_log(self) -> list[BlockOperation] | None:
        """What happened to blocks since the last step; None unless the engine sanitizes."""
        return None

    def set_placement(self, placement: int, kv_cache_config: KVCacheConfig) -> None:
        """Requests may choose a further placement, or one in the place of a retired one; the arena
        is the same. `VLLMValidationError` from a scheduler that cannot."""
        raise VLLMValidationError(f"{type(self).__name__} cannot run several placements")

    def use_memory(self, kv_cache_config: KVCacheConfig) -> None:
        """Go on with other state memory, all of it empty; no request is left.

        `VLLMValidationError` from a scheduler that cannot.
        """
        raise VLLMValidationError(
            f"{type(self).__name__} cannot go on with other state memory; start the engine anew"
        )

    def use_weights_read(self, target_bytes: int, drafter_bytes: Sequence[int]) -> None:
        """What a step reads of the target's weights, and by the number of drafts per request (from
        0 on) of the drafter's: for schedulers that choose how many it makes."""
        return

    def get_kv_connector(self) -> KVConnectorBase_V1 | None:
        """The scheduler's side of the KV connector, if there is one."""
        return None

    def take_events(self) -> list[KVCacheEvent]:
        """What state memory, and a connector's store, gained and lost since the last call."""
        return []

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """Gauges, and counters since the last call; None when statistics are off."""

    @abstractmethod
    def shutdown(self) -> None: ...
