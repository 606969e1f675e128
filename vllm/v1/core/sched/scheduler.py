# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: which requests compute how many tokens in the next step."""

from __future__ import annotations

import enum
import time
from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.results import SchedulerResults
from vllm.v1.core.sched.step_plan import DecodeSet, StepPlan, drafts_of
from vllm.v1.engine import RequestFailure
from vllm.v1.request import Request, RequestStatus

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


class Scheduler(SchedulerResults):
    """Running requests first, then waiting ones, within a token budget and the free blocks.

    Most steps only decode, and most requests then need no block and no decision: they are taken as
    they are until `Request.quiet_until`. Who is worth another look sets that back to 0.

    With pipeline stages the requests that decode take turns: a step has an equal share of them, and
    none that sampled in one of the last `num_stages - 1` steps, whose token the first stage has not
    got yet. So each stage works on requests that are independent of all other stages'.
    """

    # ---- a step --------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        if len(self._in_flight) >= self.max_steps_in_flight:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight already")
        self._step += 1
        for cache in self.caches.values():
            cache.begin_step()
        for placement in self.turns.order():
            step = StepPlan(self.max_num_batched_tokens, placement)
            if self._schedule_running(step):
                self._schedule_waiting(step)
            if step.requests:
                self.turns.ran(placement)
                break
        output = self._make_output(step)
        if self.connector is not None:
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        self._advance(step, output)
        self._in_flight.append((output, step.requests))
        return output

    def _schedule_running(self, step: StepPlan) -> bool:
        """Continue running requests; False if blocks ran out, so that nobody new can start."""
        enough = True
        requests, counts, blocks = step.requests, step.counts, step.blocks
        width = self.next_width
        # Making room shortens the list, at its end.
        running = self.running
        if not self.turns.alone:
            running = [one for one in running if one.placement == step.placement]
        if self.num_stages > 1:
            running = self._whose_turn_it_is(running)
        for request in running:
            if step.token_budget == 0:
                break
            if (
                request.num_computed_tokens + width <= request.quiet_until
                and width <= step.token_budget
                and (width == 1 or self._drafts(request))
            ):
                requests.append(request)
                counts.append(width)
                blocks.append(None)
                step.token_budget -= width
                if width > 1:
                    step.drafts[request.request_id] = width
            else:
                enough = self._continue(request, step) and enough
        return enough

    def _whose_turn_it_is(self, running: list[Request]) -> list[Request]:
        """Those of `running` that the step may take: an equal share of the decodes, longest waiting
        first, without those that sampled too recently; and every prompt, whose pieces follow each
        other through the stages."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in running:
            known = len(request.all_token_ids) + request.num_output_placeholders
            (prefills if known - request.num_computed_tokens > 1 else decodes).append(request)
        last = self._step - self.num_stages
        able = [request for request in decodes if request.last_sampling_step <= last]
        able.sort(key=attrgetter("last_sampling_step"))
        return able[: cdiv(len(decodes), self.num_stages)] + prefills

    def _share_with_new(self, step: StepPlan, max_running: int) -> int:
        """Up to how many running requests the step may start new ones, so that it has its share of
        all that there can be."""
        running = len(self.running)
        share = cdiv(min(max_running, running + len(self.waiting)), self.num_stages)
        return running + share - step.counts.count(1)

    def _continue(self, request: Request, step: StepPlan) -> bool:
        """Let a running request go on if it has anything to compute; False if blocks ran out."""
        if request.status is not RequestStatus.RUNNING:
            return False
        num_tokens, decodes = self._num_tokens_ahead(request, step.token_budget)
        if num_tokens == 0:
            return True
        enough = True
        lookahead = max(self.width - num_tokens, 0) + self.draft_lookahead
        while (
            blocks := self.caches[request.placement].allocate_slots(
                request, num_tokens, num_lookahead_tokens=lookahead
            )
        ) is None:
            enough = False
            self._make_room(request)
            if request.status is not RequestStatus.RUNNING:
                return False
        self._add_running(step, request, num_tokens, blocks)
        if not decodes:
            step.only_decodes = False
            return enough
        if num_tokens > 1:
            step.drafts[request.request_id] = num_tokens
        if num_tokens == self.next_width:
            quiet = self.caches[request.placement].quiet_until(request) - self.draft_lookahead
            request.quiet_until = min(quiet, request.length_limit - 1)
        else:
            step.only_decodes = False
        return enough

    def _num_tokens_ahead(self, request: Request, token_budget: int) -> tuple[int, bool]:
        """Tokens a running request can compute now, 0 if all it may produce is in flight; whether
        these are its newest one and drafts."""
        known = len(request.all_token_ids) + request.num_output_placeholders
        if known >= request.length_limit:
            return 0, False
        computed = request.num_computed_tokens
        decodes = known - computed == 1
        if decodes and self.next_width > 1 and self._drafts(request):
            return min(self.next_width, request.length_limit - known, token_budget), True
        return self._chunk(request, computed, known - computed, token_budget), decodes

    @staticmethod
    def _drafts(request: Request) -> bool:
        """Whether drafts may follow the request's newest token: it was sampled where they are, and
        no grammar, which the host advances, has to know them."""
        return request.num_computed_tokens >= request.num_told_tokens and request.grammar is None

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

    def _add_running(
        self, step: StepPlan, request: Request, num_tokens: int, new_blocks: KVCacheBlocks
    ) -> None:
        if self._rewound and request.request_id in self._rewound:
            self._rewound.remove(request.request_id)
            self.preempted_req_ids.add(request.request_id)
            all_blocks = self.caches[request.placement].get_block_ids(request.request_id)
            request.num_told_tokens = request.num_tokens
            step.add_resumed(request, num_tokens, all_blocks)
        else:
            step.add(request, num_tokens, new_blocks.get_block_ids(allow_none=True))

    def _make_room(self, request: Request) -> None:
        """Take the blocks of the running request with the least claim (maybe `request`)."""
        if self.kv_cache_manager.pins.release_next() or self._release_received(request):
            return
        victim = self.running[-1]
        if victim is request and self._is_only_holder(request):
            self.running.pop()
            self._fail(request, "the request does not fit the KV cache, even alone")
        else:
            self._preempt_last()

    # ---- admission -----------------------------------------------------------------------------

    def _schedule_waiting(self, step: StepPlan) -> None:
        """Start waiting requests in the order of the queue. Those of another placement are passed
        over: a place is kept for each until its turn. Behind one that found no room, or whose
        placement has no memory yet, none starts."""
        skipped: list[Request] = []
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
            if request.awaits_placement:
                break
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
                self.transfer.after_allocation(request, prefix.computed, prefix.num_external)
            except Exception as error:
                return self._fail_admission(request, error)
        self._count_prefix(request, prefix)
        request.num_computed_tokens = prefix.computed
        if prefix.load_async:
            assert self.transfer is not None
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.transfer.loading.add(request.request_id)
            return _Admission.SKIPPED
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
        if self.connector is not None:
            found, load_async = self.connector.get_num_new_matched_tokens(request, num_local)
            if found is None:
                return None
            num_external = found
        computed = num_local + num_external
        if computed > request.num_tokens or (computed == request.num_tokens and not load_async):
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
        counters = self._counters
        counters.prefix_queries += request.num_tokens
        counters.prefix_hits += prefix.num_local
        report = self.caches[request.placement].take_report(request)
        if report is not None:
            counters.add_report(report)
            request.cache_report = report if request.cache.report else None
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

    # ---- output --------------------------------------------------------------------------------

    def _make_output(self, step: StepPlan) -> SchedulerOutput:
        decodes = self._decode_set(step)
        self._decodes[self._step % self.num_stages] = decodes
        drafts = self.draft_policy.choose(step.requests) if self.width > 1 else 0
        copies_before, copies_after = self.caches[step.placement].take_copies()
        kept_states: dict[str, int] = {}
        for cache in self.caches.values():
            kept_states |= cache.take_kept_states()
        output = SchedulerOutput(
            scheduled_new_reqs=step.new,
            scheduled_cached_reqs=decodes.cached_data(step) if decodes else step.cached_data(),
            num_scheduled_tokens=(
                decodes.num_scheduled_tokens if decodes else step.num_scheduled_tokens()
            ),
            total_num_scheduled_tokens=self.max_num_batched_tokens - step.token_budget,
            scheduled_spec_decode_tokens=decodes.drafts if decodes else drafts_of(step.drafts),
            num_common_prefix_blocks=[0] * len(self.kv_cache_config.kv_cache_groups),
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
            decode_set_id=decodes.set_id if decodes else 0,
            copies_before=copies_before,
            copies_after=copies_after,
            block_log=self.kv_cache_manager.take_block_log(),
            kept_states=kept_states,
            num_next_drafts=drafts,
            placement=step.placement,
        )
        self.next_width = 1 + drafts
        self.finished_req_ids = set()
        self.preempted_req_ids = set()
        return output

    def _decode_set(self, step: StepPlan) -> DecodeSet | None:
        """What a step of decodes only shares with others like it; None for another step."""
        if not step.only_decodes or not step.requests:
            return None
        last, width = self._decodes[self._step % self.num_stages], self.next_width
        if last is not None and step.requests == last.requests and width == last.width:
            return last
        self._num_decode_sets += 1
        return DecodeSet(self._num_decode_sets, step.requests, self.next_width)

    def _advance(self, step: StepPlan, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed; state who samples."""
        decodes = self._decodes[self._step % self.num_stages]
        if decodes is None:
            constrained = self._advance_each(step, output.sampling_req_ids)
        else:
            decodes.advance()
            constrained = decodes.constrained
            output.sampling_req_ids = decodes.sampling_req_ids
        if self.num_stages > 1:
            for request in step.requests:
                if request.request_id in output.sampling_req_ids:
                    request.last_sampling_step = self._step
        output.masked_req_ids = [request.request_id for request in constrained]

    def get_kv_connector(self) -> KVConnectorBase_V1 | None:
        return self.connector

    def constrained_requests(self, scheduler_output: SchedulerOutput) -> list[Request]:
        return [self.requests[req_id] for req_id in scheduler_output.masked_req_ids]

    @staticmethod
    def _advance_each(step: StepPlan, sampling: set[str]) -> list[Request]:
        """Returns the requests that sample and follow a grammar; adds all that sample."""
        constrained: list[Request] = []
        for request, num_tokens in zip(step.requests, step.counts, strict=True):
            computed = request.num_computed_tokens + num_tokens
            request.num_computed_tokens = request.num_state_tokens = computed
            if computed >= len(request.all_token_ids) + request.num_output_placeholders:
                sampled = step.drafts.get(request.request_id, 1)
                request.num_output_placeholders += sampled
                request.num_drafts_in_flight += sampled - 1
                sampling.add(request.request_id)
                if request.grammar is not None:
                    constrained.append(request)
        return constrained
