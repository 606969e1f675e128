# SPDX-License-Identifier: Apache-2.0
"""Which waiting requests start in a step, with what is computed of them already."""

from __future__ import annotations

import enum
import time
from bisect import insort
from dataclasses import dataclass

from msgspec.structs import replace

from vllm.distributed.kv_transfer.kv_connector.v1 import answers
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.results import SchedulerResults
from vllm.v1.core.sched.step_plan import StepPlan
from vllm.v1.engine import RequestFailure
from vllm.v1.request import Request, RequestStatus

#: of a request: after these its connector is not asked for its state any more
MOST_FAILED_LOADS = 2

logger = init_logger(__name__)


class _Admission(enum.Enum):
    """What became of the request at the head of the queue."""

    RUNS = enum.auto()
    SKIPPED = enum.auto()
    AGAIN = enum.auto()
    FAILED = enum.auto()
    NO_ROOM = enum.auto()


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Computed tokens a waiting request can start from; `computed` includes all of them."""

    blocks: KVCacheBlocks | None
    num_local: int
    num_external: int
    computed: int
    load_async: bool


class SchedulerAdmission(SchedulerResults):
    """Starts waiting requests within a step's tokens and the free blocks."""

    #: the request that has the memory for itself until its end
    _starting_over: Request | None = None

    def _schedule_waiting(self, step: StepPlan) -> None:
        """Start waiting requests in the order of the queue. Those of another placement are passed
        over: a place is kept for each until its turn. Behind one that found no room, or whose
        placement has no memory yet, none starts; but who was preempted goes on, for it may hold the
        memory that the latter waits for."""
        alone = self._starting_over
        if alone is not None and alone.is_finished:
            alone = self._starting_over = None
        if alone is not None and alone.status is RequestStatus.RUNNING:
            return
        skipped: list[Request] = []
        held_up: list[Request] = []
        num_passed_over = 0
        # Workers still keep a row for each request that awaits its stop.
        max_running = self.max_num_seqs - len(self.awaiting_stop)
        most = max_running if self.num_stages == 1 else self._share_with_new(step, max_running)
        while (
            self.waiting
            and step.token_budget > 0
            and len(self.running) < most
            and len(self.running) + num_passed_over < max_running
        ):
            request = self.waiting.peek()
            if alone is not None and request is not alone:
                skipped.append(self.waiting.pop())
                continue
            if request.awaits_placement or held_up:
                # First come, first served: who was preempted stands before who has not started.
                if not self.by_priority:
                    break
                if request.status is not RequestStatus.PREEMPTED:
                    held_up.append(self.waiting.pop())
                    continue
            if request.placement != step.placement:
                if request is self._without_room:
                    break
                skipped.append(self.waiting.pop())
                num_passed_over += 1
                continue
            admission = self._admit(request, step)
            if admission is _Admission.NO_ROOM:
                self._without_room = request
                break
            if request is self._without_room:
                self._without_room = None
            if admission in (_Admission.FAILED, _Admission.AGAIN):
                continue
            self.waiting.pop()
            if admission is _Admission.SKIPPED:
                skipped.append(request)
        self.waiting.put_back(held_up)
        self.waiting.put_back(skipped)
        self.num_deferred = len(skipped) - num_passed_over

    def _admit(self, request: Request, step: StepPlan) -> _Admission:
        """Start `request` in this step if it can; it stays queued unless the result is RUNS."""
        if request.grammar is not None and not request.grammar.ready:
            return _Admission.SKIPPED
        if request.grammar is not None and (error := request.grammar.compile_error()) is not None:
            self._fail(request, error)
            return _Admission.FAILED
        if request.num_output_placeholders:
            # Preempted with a token on its way.
            return _Admission.SKIPPED
        try:
            prefix = self._find_prefix(request)
        except Exception as error:
            return self._fail_admission(request, error)
        if prefix is None or (prefix.load_async and not self._may_load()):
            return _Admission.SKIPPED
        num_tokens, blocks = self._allocate(request, prefix, step.token_budget)
        alone = not self.running and self._is_only_holder(request)
        if blocks is None and alone and prefix.num_local:
            # What a hit shares and what it copies from may be too much together.
            prefix = self._find_prefix(request, read_cache=False)
            assert prefix is not None
            num_tokens, blocks = self._allocate(request, prefix, step.token_budget)
        if blocks is None:
            if num_tokens or prefix.load_async:
                return self._no_room(request, alone)
            remaining = request.num_tokens - prefix.computed
            return self._no_room(request, remaining > self.max_num_batched_tokens)
        if self.transfer is not None:
            try:
                self.transfer.after_allocation(
                    request, prefix.computed, prefix.num_external, len(self._in_flight)
                )
            except Exception as error:
                return self._fail_admission(request, error)
        self._count_prefix(request, prefix)
        if prefix.load_async:
            assert self.transfer is not None
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.transfer.loading.add(request.request_id)
            return _Admission.SKIPPED
        request.num_computed_tokens = prefix.computed
        self._start(request, step, num_tokens)
        return _Admission.RUNS

    def _fail_admission(self, request: Request, error: Exception) -> _Admission:
        """A connector failed with this request, which runs in no step yet."""
        logger.exception("request %s cannot be scheduled", request.request_id)
        self._fail(request, RequestFailure.of("schedule", error))
        return _Admission.FAILED

    def _allocate(
        self, request: Request, prefix: _Prefix, token_budget: int
    ) -> tuple[int, KVCacheBlocks | None]:
        """Tokens for a waiting request to compute now, and blocks for them if there are any.

        0 tokens and no blocks if the prompt may not be cut and is longer than the budget.
        """
        remaining = request.num_tokens - prefix.computed
        num_tokens = 0
        if self.enable_chunked_prefill:
            self.caches[request.placement].plan_checkpoints(request, prefix.computed)
            num_tokens = self._chunk(request, prefix.computed, remaining, token_budget)
        elif remaining <= token_budget:
            num_tokens = remaining
        elif not prefix.load_async:
            return 0, None
        if prefix.load_async:
            num_tokens = 0
        lookahead = max(self.width - num_tokens, 0) + self.draft_lookahead
        return num_tokens, self.caches[request.placement].allocate_slots(
            request,
            num_tokens,
            num_new_computed_tokens=prefix.num_local,
            new_computed_blocks=prefix.blocks,
            num_external_computed_tokens=prefix.num_external,
            num_lookahead_tokens=lookahead if num_tokens else 0,
            delay_cache_blocks=prefix.load_async,
        )

    def _find_prefix(self, request: Request, read_cache: bool = True) -> _Prefix | None:
        """What is computed already, here or at the connector; None: cannot be known yet, or another
        request is computing more of it."""
        if self.transfer is not None:
            if request.request_id in self.transfer.loading:
                return None
            if request.request_id in self.transfer.received:
                if request.num_computed_tokens:
                    return self._received_prefix(request)
                # Nothing of it is of use. Its blocks may be shared, so it starts with others.
                self._return_received(request)
        blocks: KVCacheBlocks | None = None
        num_local = 0
        cache = self.caches[request.placement]
        if not read_cache:
            cache.discard_match(request)
        else:
            blocks, num_local = cache.get_computed_blocks(request)
            if cache.is_coming(request, num_local):
                return None
        num_external, load_async = 0, False
        if self.connector is not None and request.num_failed_loads < MOST_FAILED_LOADS:
            answer = self.connector.get_num_new_matched_tokens(request, num_local)
            found, load_async = answers.matched_tokens(self.connector, answer)
            if found is None:
                return None
            num_external = found
        computed = num_local + num_external
        # A state that has seen the last token cannot compute it again for its logits.
        may_be_all = load_async and self.transfer is not None and not self.transfer.keeps_states
        if num_external < 0 or computed + (not may_be_all) > request.num_tokens:
            raise RuntimeError(
                f"the KV connector matched {num_external} tokens after {num_local} cached ones; "
                f"request {request.request_id} has {request.num_tokens} and must compute its last"
            )
        return _Prefix(blocks, num_local, num_external, computed, load_async and num_external > 0)

    def _received_prefix(self, request: Request) -> _Prefix:
        """After an asynchronous load: the last token is computed again to have its logits."""
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        request.num_computed_tokens = computed
        self.caches[request.placement].cache_blocks(request, computed)
        return _Prefix(None, 0, 0, computed, False)

    def _may_load(self) -> bool:
        """Whether there is a place for one more request that waits for its state with its
        blocks."""
        assert self.transfer is not None
        waiting = len(self.transfer.loading) + len(self.transfer.received)
        return len(self.running) + waiting < self.max_num_seqs

    def _start(self, request: Request, step: StepPlan, num_tokens: int) -> None:
        step.only_decodes = False
        request.num_told_tokens = request.num_tokens
        blocks = self.caches[request.placement].get_block_ids(request.request_id)
        if request.num_preemptions:
            step.add_resumed(request, num_tokens, blocks)
        else:
            step.add_new(request, num_tokens, blocks)
            request.first_scheduled_time = time.monotonic()
        if self.transfer is not None:
            self.transfer.received.discard(request.request_id)
        request.status = RequestStatus.RUNNING
        if self.by_priority:
            insort(self.running, request)
        else:
            self.running.append(request)

    def _count_prefix(self, request: Request, prefix: _Prefix) -> None:
        if request.num_cached_tokens >= 0:
            return
        request.num_cached_tokens = prefix.computed
        request.num_external_computed_tokens = prefix.num_external
        counters = self._unsent_stats.counters
        counters.prefix_queries += request.num_tokens
        counters.prefix_hits += prefix.num_local
        report = self.caches[request.placement].take_report(request)
        if report is not None:
            counters.add_report(report)
            if request.cache.report:
                rank = self.vllm_config.parallel_config.replica
                request.cache_report = replace(report, data_parallel_rank=rank)
        if self.connector is not None:
            counters.external_queries += request.num_tokens - prefix.num_local
            counters.external_hits += prefix.num_external

    def _no_room(self, request: Request, never: bool) -> _Admission:
        if not self.running and self._release_received(request):
            return _Admission.AGAIN
        if not never or self.kv_cache_manager.pins.release_next():
            return _Admission.NO_ROOM
        self.waiting.pop()
        self._fail(request, "the request does not fit the KV cache or the token budget, even alone")
        return _Admission.FAILED

    def _share_with_new(self, step: StepPlan, max_running: int) -> int:
        """Up to how many running requests the step may start new ones, so that it has its share of
        all that there can be."""
        running = len(self.running)
        share = cdiv(min(max_running, running + len(self.waiting)), self.num_stages)
        return running + share - step.counts.count(1)

    def _chunk(self, request: Request, computed: int, num_tokens: int, token_budget: int) -> int:
        """How many of the next `num_tokens` tokens to compute at once."""
        if num_tokens == 1:
            return 1
        if 0 < self.long_prefill_token_threshold < num_tokens:
            num_tokens = self.long_prefill_token_threshold
        end = self.caches[request.placement].chunk_end(request.request_id, computed)
        if end is not None:
            num_tokens = min(num_tokens, end - computed)
        return min(num_tokens, token_budget)
