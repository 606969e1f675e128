# SPDX-License-Identifier: Apache-2.0
"""The front end's view of one engine request: its text, logprobs and what was sent of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput, join_kv_transfer_params
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    RequestConflict,
    RequestError,
    RequestFailure,
)
from vllm.v1.engine.detokenizer import Detokenizer
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.logprobs import LogprobsCollector, PendingPromptLogprobs
from vllm.v1.engine.output_stream import TextSink
from vllm.v1.engine.parallel_sampling import CacheReceipt, ParentRequest
from vllm.v1.metrics.stats import RequestStateStats

#: takes a request's outputs as they are made, or the error with which it failed
OutputSink = Callable[[RequestOutput | Exception], None]


class RequestState:
    """Turns core outputs of one completion into `RequestOutput`s.

    `external_id` is the caller's id, `request.request_id` the engine's. `index` is the
    completion's place among the `n` of `parent`.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        external_id: str,
        prompt: str | None,
        detokenizer: Detokenizer,
        logprobs: LogprobsCollector,
        stream_interval: int,
        sink: OutputSink | None = None,
        parent: ParentRequest | None = None,
        index: int = 0,
        text_sink: TextSink | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.external_id = external_id
        self.params = request.sampling_params
        self.sink = sink
        #: takes text instead of the sink, where `passes_on`
        self.text_sink = text_sink
        self.stats = RequestStateStats(
            arrival_time=request.arrival_time,
            arrival_ts=time.monotonic() - max(0.0, time.time() - request.arrival_time),
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        self.error: RequestError | None = None
        self._stop: str | None = None
        self._prompt = prompt
        self._prompt_token_ids = request.prompt_token_ids
        self._detokenizer = detokenizer
        #: generated tokens so far
        self._token_ids = detokenizer.token_ids
        self._logprobs = logprobs
        self._stream_interval = stream_interval
        self._final_only = request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        self._parent = parent
        self.index = index
        self._own_receipt = CacheReceipt()
        self._num_sent_tokens = 0
        self._num_drafts: tuple[int, int] | None = None
        #: whether nobody waits for its tokens any more
        self.is_over = False
        #: whether a token that comes with nothing else is news by itself
        self.passes_on = (
            sink is not None
            and stream_interval == 1
            and self.params.output_kind is RequestOutputKind.DELTA
            and self.params.logprobs is None
            and detokenizer.sends_at_once
        )

    @property
    def num_tokens(self) -> int:
        """Generated tokens so far."""
        return len(self._token_ids)

    @property
    def num_completions(self) -> int:
        return self._parent.n if self._parent is not None else 1

    def _receipt(self) -> CacheReceipt:
        """What the cache did for the prompt; children of one request share it."""
        return self._own_receipt if self._parent is None else self._parent.receipt

    def longest_completion(self) -> int | None:
        """At the end of this completion: tokens of the longest of all n, None while others run."""
        if self._parent is None:
            return self.num_tokens
        return self._parent.longest(self.num_tokens)

    @property
    def stop(self) -> str | None:
        """The stop string, once it is in the text."""
        return self._stop

    def update(self, output: EngineCoreOutput) -> int:
        """Take in new tokens, none after a stop string; returns how many."""
        if output.num_cached_tokens is not None:
            self.stats.num_cached_tokens = output.num_cached_tokens
            self._receipt().take(output.num_cached_tokens, output.cache_report)
        self.error = output.error
        if self._stop is not None:
            return 0
        if output.num_drafts is not None:
            self._num_drafts = output.num_drafts
        if output.new_prompt_logprobs is not None:
            self._logprobs.add_prompt(output.new_prompt_logprobs)
        before = len(self._token_ids)
        self._stop = self._detokenizer.update(
            output.new_token_ids, output.finish_reason is FinishReason.STOP
        )
        added = len(self._token_ids) - before
        if self._stop is not None and self._num_drafts is not None:
            # Of a step's tokens the last is no draft.
            unused = max(len(output.new_token_ids) - added - 1, 0)
            accepted, rejected = self._num_drafts
            self._num_drafts = (accepted - unused, rejected + unused)
        if output.new_logprobs is not None:
            self._logprobs.add_sample(output.new_logprobs, added)
        return added

    def failure(self) -> Exception | None:
        """The error for the user if the request failed."""
        if self.error is None:
            return None
        if isinstance(self.error, RequestConflict):
            return VLLMValidationError(self.error.message)
        error = self.error.message if isinstance(self.error, RequestFailure) else self.error
        return EngineGenerateError(f"request {self.external_id} failed: {error}")

    @property
    def failed_stage(self) -> str | None:
        """Where the engine failed the request; None if it did not."""
        if isinstance(self.error, RequestFailure):
            return self.error.stage
        return "unserved" if isinstance(self.error, str) else None

    def make_output(
        self,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> RequestOutput | None:
        """The news for the user; None while other completions of the request keep it back."""
        finished = finish_reason is not None
        completion = self._completion(finish_reason, stop_reason)
        completion.kv_transfer_params = kv_transfer_params
        completions = [completion]
        if self._parent is not None:
            completions = self._parent.add(completion)
            finished = self._parent.finished
        if not completions:
            return None
        return RequestOutput(
            self.external_id,
            self._prompt,
            self._prompt_token_ids,
            None,
            completions,
            finished,
            pending_prompt_logprobs=self._prompt_logprobs(),
            metrics=self.stats,
            num_cached_tokens=self._receipt().num_cached_tokens,
            kv_transfer_params=join_kv_transfer_params(completions),
            cache_report=self._receipt().report,
        )

    def pass_on(self, token_ids: list[int]) -> str:
        """As `update` for tokens after the first, where `passes_on`; returns their text, which is
        to be shown at once."""
        self._num_sent_tokens += len(token_ids)
        return self._detokenizer.pass_on(token_ids)

    def text_output(self, text: str, token_ids: list[int]) -> RequestOutput:
        """As `make_output` for what `pass_on` returned."""
        receipt = self._receipt()
        return RequestOutput(
            self.external_id,
            self._prompt,
            self._prompt_token_ids,
            None,
            [CompletionOutput(self.index, text, token_ids)],
            False,
            self.stats,
            num_cached_tokens=receipt.num_cached_tokens,
            cache_report=receipt.report,
        )

    def bare_error_output(self) -> RequestOutput:
        """The last output of a request whose outputs cannot be made: that it failed."""
        failed = CompletionOutput(self.index, "", [], finish_reason=str(FinishReason.ERROR))
        return RequestOutput(
            self.external_id, self._prompt, self._prompt_token_ids, None, [failed], True
        )

    def is_due(self) -> bool:
        """Whether an unfinished request has news to show."""
        if self._final_only:
            return False
        num_new = len(self._token_ids) - self._num_sent_tokens
        if num_new == 0:
            return False
        return self._num_sent_tokens == 0 or num_new >= self._stream_interval

    def _completion(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        finished = finish_reason is not None
        tokens = self._token_ids
        if self.params.output_kind is RequestOutputKind.DELTA:
            text = self._detokenizer.take_new_text(finished)
            tokens = tokens[self._num_sent_tokens :]
            logprobs = self._logprobs.take_sample()
        else:
            text = self._detokenizer.sendable(finished)
            tokens = list(tokens)
            sample = self._logprobs.sample
            logprobs = list(sample) if sample is not None else None
        self._num_sent_tokens = len(self._token_ids)
        return CompletionOutput(
            self.index,
            text,
            tokens,
            self._logprobs.cumulative,
            logprobs,
            None if finish_reason is None else str(finish_reason),
            stop_reason,
            num_drafts=self._num_drafts if finished else None,
        )

    def _prompt_logprobs(self) -> PendingPromptLogprobs | None:
        """In every output that holds everything so far, else once."""
        if self.params.output_kind is RequestOutputKind.CUMULATIVE:
            return self._logprobs.prompt
        return self._logprobs.take_prompt()
