# SPDX-License-Identifier: Apache-2.0
"""What generation returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.cache_options import CacheReport
from vllm.logger import init_logger
from vllm.logprobs import PromptLogprobs, SampleLogprobs

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.logprobs import PendingPromptLogprobs
    from vllm.v1.metrics.stats import RequestStateStats

logger = init_logger(__name__)


def _num_entries(rows: SampleLogprobs | PromptLogprobs | None) -> int:
    return len(rows) * len(rows[-1] or ()) if rows else 0


@dataclass
class CompletionOutput:
    """One of the `n` completions of a prompt.

    `kv_transfer_params`: what the KV connector returned for it, at its end.

    `finish_reason`: "stop", "length", "abort" or "error", None while it runs. `stop_reason`: the
    stop string or token id that ended it, None for an end-of-sequence token. `num_drafts`: draft
    tokens that were accepted and rejected, in its last output; None without a drafter.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    routed_experts: Any | None = None
    kv_transfer_params: dict[str, Any] | None = None
    num_drafts: tuple[int, int] | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, new: CompletionOutput) -> None:
        """Extend this delta by the next one of the same completion."""
        self.text += new.text
        self.token_ids = [*self.token_ids, *new.token_ids]
        if new.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *new.logprobs]
        self.cumulative_logprob = new.cumulative_logprob
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason
        self.kv_transfer_params = new.kv_transfer_params
        self.num_drafts = new.num_drafts


def join_kv_transfer_params(completions: Sequence[CompletionOutput]) -> dict[str, Any] | None:
    """What the KV connector returned for a reply: as it is for one completion, for several a list
    under each key, in their order, with None for those that have no such key."""
    given = [completion.kv_transfer_params for completion in completions]
    if len(given) == 1:
        return given[0]
    keys = dict.fromkeys(key for one in given for key in one or ())
    return {key: [(one or {}).get(key) for one in given] for key in keys} or None


class RequestOutput:
    """The state of a request: its prompt and its completions.

    `prompt_logprobs`: one entry per prompt token, the first None; made from
    `pending_prompt_logprobs`, if given, at the first look. `num_cached_tokens`: prompt
    tokens found in the prefix cache. `kv_transfer_params`: what the KV connector returned (see
    `join_kv_transfer_params`).
    Unknown keyword arguments are ignored, so that callers written for newer releases work.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestStateStats | None = None,
        lora_request: LoRARequest | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        cache_report: CacheReport | None = None,
        pending_prompt_logprobs: PendingPromptLogprobs | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            logger.warning("RequestOutput ignores unknown arguments %s", sorted(unknown))
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self._prompt_logprobs = prompt_logprobs
        self._pending_prompt_logprobs = pending_prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.kv_transfer_params = kv_transfer_params
        self.cache_report = cache_report

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        pending = self._pending_prompt_logprobs
        if pending is not None:
            self._prompt_logprobs = pending.rows()
            self._pending_prompt_logprobs = None
        return self._prompt_logprobs

    @prompt_logprobs.setter
    def prompt_logprobs(self, rows: PromptLogprobs | None) -> None:
        self._prompt_logprobs, self._pending_prompt_logprobs = rows, None

    @property
    def num_logprobs(self) -> int:
        """Logprobs that are shown if every completion repeats those of the prompt."""
        pending = self._pending_prompt_logprobs
        prompt = _num_entries(self._prompt_logprobs) if pending is None else pending.num_entries
        return sum(prompt + _num_entries(completion.logprobs) for completion in self.outputs)

    def drop_logprobs(self) -> None:
        """Free the logprobs, which takes a while where there are many."""
        self.prompt_logprobs = None
        for completion in self.outputs:
            completion.logprobs = None

    def __getstate__(self) -> dict[str, Any]:
        """What is pending needs the tokenizer, which does not travel."""
        _ = self.prompt_logprobs
        return self.__dict__

    def add(self, new: RequestOutput, aggregate: bool) -> None:
        """Merge a later output; completions are appended (`aggregate`) or replaced."""
        self.finished |= new.finished
        self.metrics = new.metrics
        self.num_cached_tokens = new.num_cached_tokens
        if self._prompt_logprobs is None and self._pending_prompt_logprobs is None:
            self._prompt_logprobs = new._prompt_logprobs
            self._pending_prompt_logprobs = new._pending_prompt_logprobs
        self.cache_report = self.cache_report or new.cache_report
        known = {completion.index: i for i, completion in enumerate(self.outputs)}
        for completion in new.outputs:
            i = known.get(completion.index)
            if i is None:
                self.outputs.append(completion)
            elif aggregate:
                self.outputs[i].append(completion)
            else:
                self.outputs[i] = completion
        joined = join_kv_transfer_params(self.outputs)
        self.kv_transfer_params = joined or new.kv_transfer_params or self.kv_transfer_params

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, prompt_logprobs={self.prompt_logprobs}, "
            f"outputs={self.outputs}, finished={self.finished}, metrics={self.metrics}, "
            f"num_cached_tokens={self.num_cached_tokens}, "
            f"kv_transfer_params={self.kv_transfer_params})"
        )
