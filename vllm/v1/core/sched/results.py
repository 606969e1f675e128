# SPDX-License-Identifier: Apache-2.0
"""The scheduler's second half: what a finished step changes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.state import ClientOutputs, SchedulerState
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    RequestConflict,
    RequestFailure,
    WireLogprobs,
)
from vllm.v1.outputs import NO_TOKEN, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import logprobs_to_wire

logger = init_logger(__name__)

Result = tuple[Request, list[int]]
T = TypeVar("T")

#: later statuses are final; compared directly because every request of a step is
_LAST_UNFINISHED = RequestStatus.PREEMPTED


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """A request's part of a step's log-probabilities."""

    prompt: WireLogprobs | None = None
    sample: WireLogprobs | None = None

    @classmethod
    def of(cls, request_id: str, output: ModelRunnerOutput) -> _Logprobs:
        prompt, sample = output.prompt_logprobs.get(request_id), output.logprobs.get(request_id)
        return cls(
            None if prompt is None else logprobs_to_wire(prompt),
            None if sample is None else logprobs_to_wire(sample),
        )


class SchedulerResults(SchedulerState):
    """Takes in tokens, finishes requests and follows transfers."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        expected, requests = self._in_flight.popleft()
        if expected is not scheduler_output:
            raise RuntimeError("steps must come back in the order in which they were scheduled")
        transfers = runner_output.kv_connector_output
        if transfers is not None:
            self._handle_failed_loads(transfers)
        if self.transfer is not None:
            self.transfer.end_step(scheduler_output)
        outputs: ClientOutputs = defaultdict(list)
        num_plain = self._take_results(scheduler_output, requests, runner_output, outputs)
        if transfers is not None:
            self._update_transfers(transfers)
        packed = self._pack(outputs, scheduler_output.total_num_scheduled_tokens > 0)
        for client_index, message in packed.items():
            message.num_plain = num_plain.get(client_index, 0)
        return packed

    def _take_results(
        self,
        scheduler_output: SchedulerOutput,
        requests: list[Request],
        runner_output: ModelRunnerOutput,
        outputs: ClientOutputs,
    ) -> dict[int, int]:
        """Take in each request's tokens; adds what to send to `outputs`, by client. Returns how
        many of each client's outputs, the first ones, hold nothing but tokens."""
        failed, prompt_logprobs = runner_output.failed_req_ids, runner_output.prompt_logprobs
        special = failed.keys() | prompt_logprobs.keys() | runner_output.logprobs.keys()
        sampled = _in_order(scheduler_output, runner_output, runner_output.sampled_token_ids, [])
        results = list(zip(requests, sampled, strict=True))
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        if runner_output.num_verified:
            verified = _in_order(scheduler_output, runner_output, runner_output.num_verified, 0)
            self._count_drafts(results, scheduled, verified)
        for request_id, proposed in runner_output.draft_token_ids.items():
            if request_id in self.requests:
                self.requests[request_id].draft_token_ids = proposed
        if not self.counts_drafts:
            results = self._take_plain(results, special, scheduled, outputs)
        num_plain = {client_index: len(own) for client_index, own in outputs.items()}
        late, self._late_outputs = self._late_outputs, defaultdict(list)
        for client_index, own in late.items():
            outputs[client_index] += own
        ended: list[Request] = []
        for request, tokens in results:
            if request.status > _LAST_UNFINISHED:
                continue
            request_id = request.request_id
            new_tokens: list[int] = []
            logprobs = _Logprobs()
            try:
                if request_id in failed:
                    request.status = RequestStatus.FINISHED_ERROR
                    request.error = failed[request_id]
                elif request_id in scheduler_output.sampling_req_ids:
                    drafts = len(scheduled.get(request_id, ()))
                    new_tokens = self._take_tokens(request, tokens, drafts)
                logprobs = _Logprobs.of(request_id, runner_output)
            except Exception as error:
                logger.exception("the results of request %s cannot be taken", request_id)
                request.status = RequestStatus.FINISHED_ERROR
                request.error = RequestFailure.of("results", error)
            finished = request.status > _LAST_UNFINISHED
            if finished:
                ended.append(request)
            if new_tokens or finished or request_id in prompt_logprobs:
                output = self._make_request_output(request, finished, new_tokens, logprobs)
                outputs[request.client_index].append(output)
        self._leave_queues(ended)
        return num_plain

    def _take_plain(
        self,
        results: list[Result],
        special: Set[str],
        scheduled: Mapping[str, Sequence[int]],
        outputs: ClientOutputs,
    ) -> list[Result]:
        """Append the tokens of every request that just goes on; returns the others, untouched.

        Outputs that hold more than tokens come behind the others, with the late ones.
        """
        others: list[Result] = []
        for result in results:
            request, tokens = result
            request_id, num_known = request.request_id, len(request.all_token_ids)
            if (
                not tokens
                or tokens[-1] == NO_TOKEN
                or not request.stop_ids.isdisjoint(tokens)
                or num_known + len(tokens) >= request.length_limit
                or num_known == request.num_prompt_tokens  # the first token brings more with it
                or request.status is not RequestStatus.RUNNING
                or request.discard_outputs
                or request.grammar is not None
                or request_id in special
            ):
                others.append(result)
                continue
            if request_id in scheduled:
                self._settle(request, len(scheduled[request_id]), len(tokens))
            else:
                request.num_output_placeholders -= 1
            request.output_token_ids.extend(tokens)
            request.all_token_ids.extend(tokens)
            output = EngineCoreOutput(request_id, tokens)
            own = outputs
            if request.num_verified_drafts and request.may_stop_earlier:
                output.num_drafts = request.draft_counts
                own = self._late_outputs
            own[request.client_index].append(output)
        return others

    def _settle(self, request: Request, num_drafts: int, num_tokens: int) -> None:
        """Of a running request's drafts all but `num_tokens - 1` were rejected."""
        request.num_output_placeholders -= 1 + num_drafts
        request.num_drafts_in_flight -= num_drafts
        rejected = 1 + num_drafts - num_tokens
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= rejected
            request.num_state_tokens -= rejected

    def _count_drafts(
        self,
        results: list[Result],
        scheduled: Mapping[str, Sequence[int]],
        verified: Sequence[int],
    ) -> None:
        """Of each request whose output counts: how many drafts it had and how many held."""
        for (request, tokens), drafts in zip(results, verified, strict=True):
            if request.request_id not in scheduled or request.discard_outputs or not tokens:
                continue
            if request.status > _LAST_UNFINISHED:
                continue
            accepted = len(tokens) - 1
            self.draft_policy.observe(len(scheduled[request.request_id]), accepted)
            if request.grammar is not None:
                # Workers do not look at those from the first on that the grammar refuses.
                drafts = min(len(request.draft_token_ids), len(scheduled[request.request_id]))
            if drafts:
                request.num_verified_drafts += drafts
                request.num_accepted_drafts += accepted
                self._unsent_stats.counters.add_drafts(drafts, accepted)

    def _take_tokens(self, request: Request, tokens: list[int], num_drafts: int) -> list[int]:
        """Append sampled tokens up to a stop; returns those that count."""
        if request.discard_outputs:
            request.discard_outputs -= 1 + num_drafts
            request.num_drafts_in_flight -= num_drafts
            return []
        if not tokens:
            raise RuntimeError(f"the workers returned no token for request {request.request_id}")
        if num_drafts:
            self._settle(request, num_drafts, len(tokens))
        else:
            request.num_output_placeholders -= 1
        kept = self._append(request, tokens)
        # Workers do not know all that ends a request. Of the tokens they sampled the last is no
        # draft, and no other that is past the end became output.
        request.num_accepted_drafts -= max(len(tokens) - len(kept) - 1, 0)
        return kept

    def _append(self, request: Request, tokens: list[int]) -> list[int]:
        """Append `tokens` as far as they count; returns these."""
        for position, token in enumerate(tokens):
            if self.counts_drafts and request.output_token_ids:
                held = token == request.output_token_ids[-1]
                self._unsent_stats.counters.add_drafts(1, int(held))
            if token == NO_TOKEN:
                request.status = RequestStatus.FINISHED_ERROR
                request.error = nothing_to_sample(request)
                return tokens[:position]
            if request.grammar is not None and not request.grammar.accept(token):
                request.status = RequestStatus.FINISHED_ERROR
                request.error = request.grammar.error()
                return tokens[:position]
            request.append_output_token_ids(token)
            runs = request.status is RequestStatus.RUNNING
            if check_stop(request):
                if runs and self.ends_rows and token in request.device_stop_ids:
                    request.end_at_newest()
                return tokens[: position + 1]
        return tokens

    def _make_request_output(
        self,
        request: Request,
        finished: bool,
        new_tokens: list[int],
        logprobs: _Logprobs,
    ) -> EngineCoreOutput:
        if finished:
            output = self._finish_or_wait(request)
            output.new_token_ids = new_tokens
        else:
            output = EngineCoreOutput(request.request_id, new_tokens)
            output.num_cached_tokens = request.num_cached_tokens
            if request.may_stop_earlier:
                # The front end may end it with what it knows by then.
                output.num_drafts = request.draft_counts
        output.new_prompt_logprobs = logprobs.prompt
        if new_tokens:
            output.new_logprobs = logprobs.sample
            if len(request.output_token_ids) == len(new_tokens):
                output.times = (request.queued_time, request.first_scheduled_time)
                output.cache_report = request.cache_report
        return output

    def _finish_or_wait(self, request: Request) -> EngineCoreOutput:
        """Finish a request that reached its own end, unless the front end has to be heard first."""
        failed = request.status is RequestStatus.FINISHED_ERROR
        if self.transfer is None or failed or not request.may_stop_earlier:
            return request.last_output(self._finish(request))
        self.awaiting_stop.add(request.request_id)
        output = request.last_output(None)
        output.awaits_stop = True
        return output

    # ---- transfers -----------------------------------------------------------------------------

    def _update_transfers(self, transfers: KVConnectorOutput) -> None:
        assert self.transfer is not None
        if transfers.kv_connector_stats is not None:
            self._unsent_stats.add_of_connector(transfers.kv_connector_stats)
        for request_id in self.transfer.update(transfers, self.requests):
            request = self.requests[request_id]
            if request.is_finished and not self.transfer.is_tracking(request_id):
                self.transfer.received.discard(request_id)
                self._free(request)

    def _handle_failed_loads(self, transfers: KVConnectorOutput) -> None:
        """Blocks failed to load: compute again from the first bad one, or end the requests."""
        assert self.transfer is not None
        failed = self.transfer.failed_blocks(transfers)
        for request in list(self.requests.values()) if failed else ():
            valid = self.transfer.num_valid_tokens(request, failed)
            if valid is None:
                continue
            # Finished ones too: what they computed is cached when their blocks are freed.
            self.transfer.cancel_failed(request, valid)
            request.num_failed_loads += 1
            request.quiet_until = 0
            if request.is_finished:
                continue
            if not self.recompute_failed_loads:
                self._fail(request, "loading the request's KV cache failed")
            elif request.status is not RequestStatus.RUNNING:
                continue
            elif self.transfer.has_gaps(request):
                self.running.remove(request)
                self._preempt(request)
            else:
                self._drop_in_flight_tokens(request)
                self._rewound.add(request.request_id)

    # ---- sending -------------------------------------------------------------------------------

    def _pack(self, outputs: ClientOutputs, computed: bool) -> dict[int, EngineCoreOutputs]:
        now = time.monotonic()
        packed = {
            client_index: EngineCoreOutputs(outputs=own, timestamp=now)
            for client_index, own in outputs.items()
        }
        # Blocks also come back in steps without work: after a transfer, an abort, a pin's end.
        news = outputs or computed or self._unsent_stats.are_news(self._gauges())
        stats = self.make_stats() if news else None
        if stats is not None:
            packed.setdefault(0, EngineCoreOutputs(timestamp=now)).scheduler_stats = stats
        return packed


def nothing_to_sample(request: Request) -> str | RequestConflict:
    """Why there was no token: what the client barred, or the model gave no numbers."""
    if request.grammar is not None:
        return request.grammar.error()
    params = request.sampling_params
    if params is not None and (params.allowed_token_ids or params.bad_words_token_ids):
        return RequestConflict(
            f"after {len(request.output_token_ids)} tokens none was left to sample: "
            "allowed_token_ids, bad_words and min_tokens bar them all"
        )
    return "the model's logits are not numbers"


def _in_order(
    scheduler_output: SchedulerOutput,
    runner_output: ModelRunnerOutput,
    values: Sequence[T],
    missing: T,
) -> Sequence[T]:
    """`values` of the step's requests in the order of scheduling; workers have their own."""
    scheduled = scheduler_output.num_scheduled_tokens
    if runner_output.req_ids == list(scheduled):
        return values
    index = runner_output.req_id_to_index
    places = (index.get(request_id) for request_id in scheduled)
    return [missing if place is None else values[place] for place in places]


def check_stop(request: Request) -> bool:
    """Set the final status if the newest token ends the request.

    An end-of-sequence token leaves `stop_reason` None; a stop token id is its own reason. Stop
    tokens do not count below `min_tokens`, the length limits always do, and so does the end of a
    grammar: nothing could follow it.
    """
    params = request.sampling_params
    assert params is not None
    output = request.output_token_ids
    token = output[-1]
    if token in request.stop_ids and len(output) >= params.min_tokens:
        request.status = RequestStatus.FINISHED_STOPPED
        if token != request.eos_token_id or params.ignore_eos:
            request.stop_reason = token
        return True
    if request.grammar is not None and request.grammar.terminated:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    if len(request.all_token_ids) >= request.length_limit:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False
