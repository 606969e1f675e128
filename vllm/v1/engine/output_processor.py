# SPDX-License-Identifier: Apache-2.0
"""From core outputs to request outputs, for all requests of a front end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PlainOutputs,
    RequestFailure,
    StopRequest,
)
from vllm.v1.engine.detokenizer import Detokenizer
from vllm.v1.engine.logprobs import LogprobsCollector, TokenTexts
from vllm.v1.engine.output_stream import TextSink
from vllm.v1.engine.parallel_sampling import ParentRequest, child_requests
from vllm.v1.engine.plain_outputs import split_tokens
from vllm.v1.engine.request_state import OutputSink, RequestState
from vllm.v1.metrics.stats import IterationStats

logger = init_logger(__name__)

#: a request and its new tokens
PlainRow = tuple[RequestState, list[int]]


@dataclass
class ProcessedOutputs:
    """`request_outputs`: those of requests without a sink. `aborts`, `stops`: requests that reached
    a stop string, which only the front end can see, to be aborted or stopped in the core."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    stops: list[StopRequest] = field(default_factory=list)


@dataclass
class _Turn:
    """A message of the core that is taken in: when it was sent, and what comes of it."""

    timestamp: float
    iteration: IterationStats | None
    processed: ProcessedOutputs = field(default_factory=ProcessedOutputs)


class OutputProcessor:
    """Holds a `RequestState` per engine request until it is finished.

    `core_sees_stops`: a request that reaches a stop string waits for the core's last message, which
    carries what the KV connector has for the client. Otherwise it is aborted there.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stream_interval: int = 1,
        core_sees_stops: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._stream_interval = stream_interval
        self._core_sees_stops = core_sees_stops
        self.request_states: dict[str, RequestState] = {}
        self._internal_ids: defaultdict[str, list[str]] = defaultdict(list)
        #: the requests of each replica's last plain outputs, while the same ones may come again
        self._plain: dict[int, tuple[list[str], list[RequestState | None]]] = {}

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def add_request(
        self,
        request: EngineCoreRequest,
        external_id: str,
        prompt: str | None,
        sink: OutputSink | None = None,
        text_sink: TextSink | None = None,
    ) -> list[EngineCoreRequest]:
        """Start following a request; returns the n requests that the core makes of it.

        `text_sink`: gets what is nothing but text, instead of `sink`. Raises
        `VLLMValidationError` if the id is in use.
        """
        params = request.sampling_params
        parent = None if params.n == 1 else ParentRequest(params.n, params.output_kind)
        children = child_requests(request)
        for child in children:
            if child.request_id in self.request_states:
                raise VLLMValidationError(
                    f"request id {child.request_id!r} is already in use", "request_id"
                )
        self._plain.clear()
        for index, child in enumerate(children):
            self.request_states[child.request_id] = RequestState(
                child,
                external_id,
                prompt,
                Detokenizer(self._tokenizer, child.prompt_token_ids, child.sampling_params),
                LogprobsCollector(child.sampling_params, self._texts),
                self._stream_interval,
                sink,
                parent,
                index,
                text_sink,
            )
            self._internal_ids[external_id].append(child.request_id)
        return children

    def process_outputs(
        self, outputs: EngineCoreOutputs, iteration: IterationStats | None = None
    ) -> ProcessedOutputs:
        """Take a message of the core; outputs of requests that are gone are dropped."""
        turn = _Turn(outputs.timestamp, iteration)
        for output in outputs.outputs:
            state = self.request_states.get(output.request_id)
            if state is not None:
                self._try(state, output, turn)
        if outputs.plain is not None:
            rows = self.plain_rows(outputs.plain, outputs.engine_index)
            self._take_plain(rows, turn)
        return turn.processed

    def plain_rows(self, plain: PlainOutputs, engine_index: int = 0) -> list[PlainRow]:
        """The requests that still run and their new tokens; `engine_index`: their replica."""
        assert plain.request_ids is not None
        ids, states = self._plain.get(engine_index, (None, []))
        if plain.request_ids is not ids:
            states = [self.request_states.get(one) for one in plain.request_ids]
            self._plain[engine_index] = plain.request_ids, states
        rows = zip(states, split_tokens(plain), strict=True)
        return [(state, tokens) for state, tokens in rows if state is not None]

    def process_plain(
        self, rows: Iterable[PlainRow], timestamp: float, iteration: IterationStats | None
    ) -> ProcessedOutputs:
        """As `process_outputs` for some of the `plain_rows` of a message."""
        turn = _Turn(timestamp, iteration)
        self._take_plain(rows, turn)
        return turn.processed

    def _take_plain(self, rows: Iterable[PlainRow], turn: _Turn) -> None:
        iteration, timestamp = turn.iteration, turn.timestamp
        for state, tokens in rows:
            if state.is_over:
                continue
            sink = state.sink
            if not state.passes_on or sink is None:
                output = EngineCoreOutput(state.request_id, tokens)
                self._try(state, output, turn)
                continue
            try:
                text = state.pass_on(tokens)
                if state.text_sink is not None:
                    state.text_sink(state.index, text, tokens, state.text_output)
                else:
                    sink(state.text_output(text, tokens))
            except Exception as error:
                self._cannot_make(state, error, turn)
            else:
                if iteration is not None:
                    iteration.add_next_tokens(state.stats, len(tokens), timestamp)

    def _try(self, state: RequestState, output: EngineCoreOutput, turn: _Turn) -> None:
        try:
            self._process(state, output, turn)
        except Exception as error:
            self._cannot_make(state, error, turn)

    def _cannot_make(self, state: RequestState, error: Exception, turn: _Turn) -> None:
        """End a request with all its completions."""
        logger.error("the outputs of request %s cannot be made", state.external_id, exc_info=error)
        for request_id in list(self._internal_ids[state.external_id]):
            sibling = self.request_states[request_id]
            turn.processed.aborts.append(request_id)
            self._forget(sibling, FinishReason.ERROR, turn)
        state.error = RequestFailure.of("output", error)
        if turn.iteration is not None:
            turn.iteration.failures.append("output")
        if state.sink is not None and (failure := state.failure()) is not None:
            state.sink(failure)
        else:
            turn.processed.request_outputs.append(state.bare_error_output())

    def _process(self, state: RequestState, output: EngineCoreOutput, turn: _Turn) -> None:
        processed = turn.processed
        num_new = state.update(output)
        if turn.iteration is not None:
            if state.failed_stage is not None:
                turn.iteration.failures.append(state.failed_stage)
            turn.iteration.add_tokens(state.stats, num_new, turn.timestamp, output.times)
        finish_reason, stop_reason, stop = output.finish_reason, output.stop_reason, state.stop
        if output.awaits_stop:
            if stop is None or num_new:  # else the core hears of the stop already
                processed.stops.append(StopRequest(output.request_id, state.num_tokens))
            return
        if finish_reason is None and stop is None and not state.is_due():
            return
        if stop is not None and finish_reason is not FinishReason.ERROR:
            if finish_reason is None:
                if self._core_sees_stops:
                    if num_new:
                        processed.stops.append(StopRequest(output.request_id, state.num_tokens))
                    return
                processed.aborts.append(output.request_id)
            finish_reason, stop_reason = FinishReason.STOP, stop
        self._emit(state, finish_reason, stop_reason, output.kv_transfer_params, processed)
        if finish_reason is not None:
            self._forget(state, finish_reason, turn)

    def _emit(
        self,
        state: RequestState,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        kv_transfer_params: dict[str, Any] | None,
        processed: ProcessedOutputs,
    ) -> None:
        made = state.make_output(finish_reason, stop_reason, kv_transfer_params)
        failure = state.failure()
        if state.sink is not None:
            if (news := failure or made) is not None:
                state.sink(news)
            return
        if failure is not None:
            logger.error("request %s ended early: %s", state.external_id, failure)
        if made is not None:
            processed.request_outputs.append(made)

    def _forget(self, state: RequestState, reason: FinishReason, turn: _Turn) -> None:
        if turn.iteration is not None:
            turn.iteration.add_finished(
                state.stats,
                reason,
                turn.timestamp,
                state.params.max_tokens,
                state.num_completions,
                state.longest_completion(),
            )
        state.is_over = True
        del self.request_states[state.request_id]
        siblings = self._internal_ids[state.external_id]
        siblings.remove(state.request_id)
        if not siblings:
            del self._internal_ids[state.external_id]

    def abort_requests(
        self, external_ids: Iterable[str], iteration: IterationStats | None = None
    ) -> tuple[list[str], list[RequestOutput]]:
        """End requests by the caller's ids; unknown ones are ignored.

        Returns the engine's ids, to be aborted there, and the last outputs ("abort") of requests
        without a sink.
        """
        turn = _Turn(time.monotonic(), iteration)
        aborted: list[str] = []
        for external_id in external_ids:
            for request_id in list(self._internal_ids.get(external_id, ())):
                state = self.request_states[request_id]
                aborted.append(request_id)
                self._emit(state, FinishReason.ABORT, None, None, turn.processed)
                self._forget(state, FinishReason.ABORT, turn)
        return aborted, turn.processed.request_outputs

    def drop_requests(
        self, request_ids: Iterable[str], iteration: IterationStats | None = None
    ) -> list[str]:
        """Forget requests, by the engine's ids, whose consumer is gone; returns those still known,
        to be aborted in the engine."""
        turn = _Turn(time.monotonic(), iteration)
        states = [self.request_states.get(request_id) for request_id in request_ids]
        known = [state for state in states if state is not None]
        for state in known:
            self._forget(state, FinishReason.ABORT, turn)
        return [state.request_id for state in known]

    def external_ids(self) -> list[str]:
        """Ids, as callers know them, of all unfinished requests."""
        return list(self._internal_ids)
