# SPDX-License-Identifier: Apache-2.0
"""The scheduler's requests: how they come, wait, lose their blocks and go."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.core.placement_caches import PlacementCaches
from vllm.v1.core.sched.draft_policy import DraftPolicy
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.kv_transfer import KVTransfer, create_scheduler_connector
from vllm.v1.core.sched.output import BlockOperation, SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.stats import Gauges, UnsentStats
from vllm.v1.core.sched.step_plan import DecodeSet
from vllm.v1.engine import EngineCoreOutput, RequestError, RequestFailure, SchedulerStats
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events.messages import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

#: messages by client index
ClientOutputs = defaultdict[int, list[EngineCoreOutput]]


class SchedulerState(SchedulerInterface):
    """Queues and their invariants, without the policy.

    `running` is ordered by claim (admission, or priority): the request to preempt is its last.
    `requests` also holds finished ones whose blocks a transfer still needs.

    With a connector, a request with stop strings that reaches its own end waits in `awaiting_stop`:
    only the front end sees stop strings, and the connector gets no token that the reply leaves out.
    """

    #: steps that may be in flight besides one per pipeline stage
    steps_ahead: ClassVar[int] = 0

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, log_stats: bool = True
    ) -> None:
        assert vllm_config.model_config is not None
        config = vllm_config.scheduler_config
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.log_stats = log_stats
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = vllm_config.model_config.max_model_len
        self.enable_chunked_prefill = config.enable_chunked_prefill
        self.long_prefill_token_threshold = config.long_prefill_token_threshold
        self.by_priority = config.policy == "priority"
        self._use_memory(kv_cache_config)

        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue(self.by_priority)
        self.running: list[Request] = []
        self.awaiting_stop: set[str] = set()
        self.finished_req_ids: set[str] = set()
        self.preempted_req_ids: set[str] = set()
        #: running requests whose computed tokens were taken back: workers must rebuild them
        self._rewound: set[str] = set()
        #: stages of the pipeline that steps run through
        self.num_stages = vllm_config.parallel_config.pipeline_parallel_size
        self.max_steps_in_flight = self.num_stages + self.steps_ahead
        #: of as many last steps as there are stages, by their number modulo that: the requests, if
        #: all of them decoded
        self._decodes: list[DecodeSet | None] = [None] * self.num_stages
        #: number of the step; requests that never sampled did so in step 0, long ago
        self._step = self.num_stages
        self._num_decode_sets = 0
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        #: by client, outputs made outside `update_from_output`, sent with the next one
        self._late_outputs: ClientOutputs = defaultdict(list)
        self._unsent_stats = UnsentStats()
        #: whether a reset changed the gauges, which the next step tells
        self._has_new_gauges = False
        #: the waiting request that found no room: nobody behind it starts, whatever its placement
        self._without_room: Request | None = None
        #: waiting requests that the last step could not take for another reason than room: their
        #: grammar is being compiled, their state is on its way
        self.num_deferred = 0
        speculative = vllm_config.speculative_config
        #: tokens of a request that verifies drafts in one step, at most
        self.width = vllm_config.tokens_to_verify
        drafter = vllm_config.drafter
        self.draft_policy = DraftPolicy(self.width - 1, bool(drafter and drafter.full_width))
        #: tokens of such a request in the next step: the policy's choice, one of `step_widths`
        self.next_width = self.width
        #: whether workers compute nothing after a token that ends a request
        self.ends_rows = vllm_config.ends_rows
        #: tokens past a step's whose slots the drafter's own layers write
        self.draft_lookahead = drafter.lookahead_tokens if drafter else 0
        self.counts_drafts = self.width == 1 and speculative is not None

        self.connector = create_scheduler_connector(vllm_config, kv_cache_config)
        self.transfer: KVTransfer | None = None
        self.recompute_failed_loads = False
        if self.connector is not None:
            assert vllm_config.kv_transfer_config is not None
            self.transfer = KVTransfer(self.connector, kv_cache_config, self.kv_cache_manager)
            policy = vllm_config.kv_transfer_config.kv_load_failure_policy
            self.recompute_failed_loads = policy == "recompute"

    def use_weights_read(self, target_bytes: int, drafter_bytes: Sequence[int]) -> None:
        self.draft_policy.use_weights_read(target_bytes, drafter_bytes)

    def use_memory(self, kv_cache_config: KVCacheConfig) -> None:
        assert not self.requests
        self._use_memory(kv_cache_config)
        # Who listens to events knows blocks of the old memory.
        self.caches.reset_prefix_cache()
        if self.connector is not None:
            self.connector.leave_memory(kv_cache_config)
            self.transfer = KVTransfer(self.connector, kv_cache_config, self.kv_cache_manager)

    def _use_memory(self, kv_cache_config: KVCacheConfig) -> None:
        self.kv_cache_config = kv_cache_config
        self.caches = PlacementCaches(self.vllm_config, kv_cache_config)
        #: of the placement that the engine has at its start; the memory as a whole is in any
        self.kv_cache_manager = self.caches[0]

    def waiting_requests(self) -> list[Request]:
        return list(self.waiting)

    def retire_placement(self, placement: int) -> bool:
        own = [
            request
            for request in self.requests.values()
            if request.placement == placement and not request.awaits_placement
        ]
        if any(request.status is not RequestStatus.WAITING for request in own):
            return False
        if not self.caches.forget(placement):
            return False
        for request in own:
            self.caches[placement].discard_match(request)
            request.placement, request.awaits_placement = 0, True
        return True

    def take_block_log(self) -> list[BlockOperation] | None:
        return self.kv_cache_manager.take_block_log()

    def set_placement(self, placement: int, kv_cache_config: KVCacheConfig) -> None:
        self.kv_cache_config = kv_cache_config
        self.caches.set_placement(placement, kv_cache_config)

    # ---- coming --------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is still in use")
        request.queued_time = time.monotonic()
        request.length_limit = min(request.length_limit, self.max_model_len)
        if self.connector is not None:
            self.connector.on_new_request(request)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    # ---- losing blocks -------------------------------------------------------------------------

    def _preempt_last(self) -> None:
        """Take the blocks of the running request with the least claim; it is computed again."""
        self._preempt(self.running.pop())

    def _preempt(self, request: Request) -> None:
        if self.transfer is not None:
            self.transfer.abandon_load(request)
        self.caches[request.placement].free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.quiet_until = 0
        request.num_preemptions += 1
        if self.transfer is not None:
            # A connector may want the blocks of a request that ends, so it must not end without.
            self._drop_in_flight_tokens(request)
        self._rewound.discard(request.request_id)
        self.preempted_req_ids.add(request.request_id)
        self.waiting.prepend(request)
        self._unsent_stats.counters.num_preemptions += 1

    def _release_received(self, claimant: Request) -> bool:
        """Take the blocks of another request that waits with state from a connector, the youngest;
        it is looked up again. False if there is none."""
        received = (
            set() if self.transfer is None else self.transfer.received - {claimant.request_id}
        )
        if not received:
            return False
        request = next(r for r in reversed(self.requests.values()) if r.request_id in received)
        self._return_received(request)
        return True

    def _return_received(self, request: Request) -> None:
        """A waiting request gives up the blocks that a connector filled."""
        assert self.transfer is not None
        self.transfer.received.discard(request.request_id)
        self.caches[request.placement].free(request)
        request.num_computed_tokens = 0
        request.num_cached_tokens = -1

    @staticmethod
    def _drop_in_flight_tokens(request: Request) -> None:
        request.discard_outputs += request.num_output_placeholders
        request.num_output_placeholders = 0

    def _is_only_holder(self, request: Request) -> bool:
        """Whether no other request holds blocks whose return could be awaited."""
        return not any(
            other.status is RequestStatus.RUNNING
            or other.is_finished
            or (self.transfer is not None and self.transfer.holds_blocks(other.request_id))
            for other in self.requests.values()
            if other is not request
        )

    # ---- going ---------------------------------------------------------------------------------

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> None:
        assert RequestStatus.is_finished(finished_status)
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        known = (self.requests.get(request_id) for request_id in dict.fromkeys(request_ids))
        queued, ending = [], []
        for request in known:
            if request is None:
                continue
            if not request.is_finished:
                queued.append(request)
            elif request.request_id not in self.awaiting_stop:
                continue
            request.status = finished_status
            ending.append(request)
        self._leave_queues(queued)
        for request in ending:
            self._finish(request)

    def request_ids_of(self, client_index: int) -> list[str]:
        return [
            one.request_id for one in self.requests.values() if one.client_index == client_index
        ]

    def stop_request(self, request_id: str, num_output_tokens: int) -> None:
        request = self.requests.get(request_id)
        if request is None or (request.is_finished and request_id not in self.awaiting_stop):
            return
        request.may_stop_earlier = False
        at_own_end = request.is_finished
        num_rows = request.num_prompt_tokens + num_output_tokens - 1
        if self.transfer is not None:
            # What is on its way may be of tokens past the stop.
            self.transfer.limit_load(request_id, 0)
        if not at_own_end and request.num_computed_tokens < num_rows:
            # Preempted: a connector may want the state that went with its blocks. It is computed
            # again, up to the last token, which is sampled again.
            self._drop_in_flight_tokens(request)
            request.truncate_output(num_output_tokens - 1)
            request.limit_output(num_output_tokens)
            if request.status is RequestStatus.RUNNING:
                self._rewound.add(request_id)
            return
        if num_output_tokens < request.num_output_tokens or not at_own_end:
            request.truncate_output(num_output_tokens)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
            request.status = RequestStatus.FINISHED_STOPPED
        if not at_own_end:
            self._leave_queues([request])
        self._finish_late(request)

    def _leave_queues(self, requests: list[Request]) -> None:
        """Take finished requests out of `running` and, if they were there, `waiting`."""
        if not requests:
            return
        still_running = [request for request in self.running if not request.is_finished]
        if len(self.running) - len(still_running) < len(requests):
            self.waiting.remove(requests)
        self.running = still_running

    def _finish(self, request: Request) -> dict[str, Any] | None:
        """Tell workers and connector of a finished request and free its blocks unless a transfer
        needs them; returns the connector's parameters for the client."""
        self.finished_req_ids.add(request.request_id)
        self.awaiting_stop.discard(request.request_id)
        self._rewound.discard(request.request_id)
        keep, params = False, None
        if self.transfer is not None:
            try:
                keep, params = self.transfer.request_finished(request)
            except Exception as error:
                logger.exception("the connector failed at the end of %s", request.request_id)
                if request.status is not RequestStatus.FINISHED_ABORTED:
                    request.status = RequestStatus.FINISHED_ERROR
                    request.error = RequestFailure.of("save", error)
                keep = self.transfer.is_tracking(request.request_id)
        if keep:
            self.caches[request.placement].drop_checkpoints(request)
        else:
            self._free(request)
        return params

    def _free(self, request: Request) -> None:
        assert request.is_finished
        self.caches[request.placement].free(request)
        del self.requests[request.request_id]

    def _fail(self, request: Request, reason: RequestError) -> None:
        """End a request that cannot be served; its error goes out with the next outputs."""
        request.status = RequestStatus.FINISHED_ERROR
        request.error = reason
        self._leave_queues([request])
        self._finish_late(request)

    def _finish_late(self, request: Request) -> None:
        """Finish a request outside a step's results; its last message goes out with the next."""
        params = self._finish(request)
        self._late_outputs[request.client_index].append(request.last_output(params))

    def has_requests(self) -> bool:
        return bool(
            self.requests
            or self.finished_req_ids
            or self.preempted_req_ids
            or self._late_outputs
            or self._has_new_gauges
            or (self.connector is not None and self.connector.has_pending_push_work())
            or self.kv_cache_manager.pins.is_over()
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def shutdown(self) -> None:
        if self.connector is not None:
            self.connector.shutdown()

    # ---- cache and statistics ------------------------------------------------------------------

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        held = self._take_all_back() if reset_running_requests else []
        done = self.caches.reset_prefix_cache(held)
        if reset_connector and self.connector is not None:
            # A load that nobody takes back reads what is stored.
            reads = self.transfer and self.transfer.loading and not reset_running_requests
            done = not reads and self.connector.reset_cache() is not False and done
        self._has_new_gauges = self.log_stats and self._unsent_stats.have_changed(self._gauges())
        return done

    def _take_all_back(self) -> list[Request]:
        """Let every request compute all of its tokens again; returns those whose blocks a transfer
        still reads or writes."""
        while self.running:
            self._preempt_last()
        loading: set[str] = set()
        if self.transfer is not None:
            loading = self.transfer.loading
            for request_id in list(self.transfer.received):
                self._return_received(self.requests[request_id])
            for request_id in loading:
                # Its blocks are given back when the load has ended, whatever has come by then.
                self.transfer.limit_load(request_id, 0)
        return [r for r in self.requests.values() if r.is_finished or r.request_id in loading]

    def take_events(self) -> list[KVCacheEvent]:
        events = self.kv_cache_manager.take_events()
        if self.connector is not None:
            events += self.connector.take_events()
        return events

    def _gauges(self) -> Gauges:
        return Gauges(len(self.running), len(self.waiting), self.kv_cache_manager.usage)

    def make_stats(self) -> SchedulerStats | None:
        if not self.log_stats:
            return None
        stats = self._unsent_stats.take(self._gauges())
        stats.num_deferred = min(self.num_deferred, stats.num_waiting)
        stats.num_drafts_allowed = self.next_width - 1
        stats.steps_by_drafts = self.draft_policy.take_counts()
        return stats
