# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: which requests compute how many tokens in the next step."""

from __future__ import annotations

from operator import attrgetter

from vllm.distributed.kv_transfer.kv_connector.v1 import answers
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.admission import SchedulerAdmission
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.step_plan import DecodeSet, StepPlan, drafts_of
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)


class Scheduler(SchedulerAdmission):
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
        for placement in list(self.caches):
            step = StepPlan(self.max_num_batched_tokens, placement)
            if self._schedule_running(step):
                self._schedule_waiting(step)
            if step.requests:
                # Who ran last is asked last: none waits for more than a step of every other one.
                self.caches[placement] = self.caches.pop(placement)
                break
        output = self._make_output(step)
        if self.connector is not None:
            answer = self.connector.build_connector_meta(output)
            output.kv_connector_metadata = answers.metadata(self.connector, answer)
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
        if len(self.caches) > 1:
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
        """Whether drafts may follow the request's newest token: it was sampled where they are."""
        return request.num_computed_tokens >= request.num_told_tokens

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
        if victim is not request or not self._is_only_holder(request):
            self._preempt_last()
        elif request is self._starting_over:
            self.running.pop()
            self._fail(request, "the request does not fit the KV cache, even alone")
        else:
            self._start_over(request)

    def _start_over(self, request: Request) -> None:
        """Compute a request again that holds all there is. Its blocks lie in more pages than it
        needs, among those of others that were there before it; in an empty memory, and without
        others until its end, they lie close together."""
        logger.warning(
            "request %s starts over: it needs the KV cache for itself", request.request_id
        )
        self._preempt_last()
        self.caches.reset_prefix_cache()
        self._starting_over = request

    # ---- output --------------------------------------------------------------------------------

    def _make_output(self, step: StepPlan) -> SchedulerOutput:
        decodes = self._decode_set(step)
        self._decodes[self._step % self.num_stages] = decodes
        drafts = 0
        if self.width > 1:
            drafts = self.draft_policy.choose(len(step.requests))
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
            block_log=self.take_block_log(),
            kept_states=kept_states,
            num_next_drafts=drafts,
            placement=step.placement,
        )
        self.next_width = 1 + drafts
        self.finished_req_ids = set()
        self.preempted_req_ids = set()
        self._has_new_gauges = False
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
