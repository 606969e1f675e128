# SPDX-License-Identifier: Apache-2.0
"""An engine that "generates" a fixed sentence, for tests of the HTTP server without a model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vllm.config.areas import ObservabilityConfig
from vllm.decisions import DecisionLog
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.model_executor.placements import Placement, expand
from vllm.outputs import CompletionOutput, RequestOutput, join_kv_transfer_params
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.sleep import LEVELS, check_tags
from vllm.v1.metrics.prometheus import metrics_text

SENTENCE = "Grüße from the engine! "
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}{{ extra | default('') }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 259
MAX_LOGPROBS = 300
MAX_MODEL_LEN = 512


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = chat_template
    return tokenizer


@dataclass
class FakeModelConfig:
    """The part of `ModelConfig` that the server reads."""

    model: str = "/models/fake"
    served_names: list[str] = field(default_factory=lambda: ["fake", "alias"])
    max_model_len: int = MAX_MODEL_LEN
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    hf_token: str | None = "hf_secret"
    is_hybrid: bool = True
    placement_aliases: dict[str, str] = field(default_factory=dict)

    def get_vocab_size(self) -> int:
        return VOCAB_SIZE

    def get_diff_sampling_param(self) -> dict[str, Any]:
        return self.sampling_defaults


@dataclass
class FakeSchedulerConfig:
    """The part of `SchedulerConfig` that the server reads."""

    max_num_seqs: int = 2


@dataclass
class FakeParallelConfig:
    """The part of `ParallelConfig` that the server reads."""

    world_size: int = 1
    local_ranks: range = range(1)


@dataclass
class FakeVllmConfig:
    """The part of `VllmConfig` that the server reads."""

    model_config: FakeModelConfig
    scheduler_config: FakeSchedulerConfig = field(default_factory=FakeSchedulerConfig)
    parallel_config: FakeParallelConfig = field(default_factory=FakeParallelConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    decisions: DecisionLog = field(default_factory=DecisionLog)


@dataclass(frozen=True)
class Call:
    """One `generate` call as the engine saw it."""

    prompt: dict[str, Any]
    params: SamplingParams
    request_id: str
    kwargs: dict[str, Any]


class FakeAsyncLLM:
    """Same interface as `AsyncLLM`. Knobs: `hang_after` tokens it waits forever, `fail_after`
    tokens it raises `error`, `dead` makes it report its death."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        self.tokenizer: PreTrainedTokenizerFast | None = tokenizer or byte_tokenizer()
        self.model_config = FakeModelConfig()
        self.vllm_config = FakeVllmConfig(self.model_config)
        self.calls: list[Call] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.hang_after: int | None = None
        #: requests that have begun to wait forever
        self.num_hung = 0
        self.fail_after: int | None = None
        self.error: Exception = EngineDeadError("core killed")
        self.dead = False
        self.asleep = False
        self.placement = {0: "gdn", 1: "gdn"}
        self.shut_down = False

    @property
    def errored(self) -> bool:
        return self.dead

    @property
    def dead_error(self) -> EngineDeadError:
        return EngineDeadError("core killed")

    def get_tokenizer(self) -> PreTrainedTokenizerFast | None:
        return self.tokenizer

    def metrics_text(self) -> bytes:
        return metrics_text(CollectorRegistry())

    async def check_health(self) -> None:
        if self.dead:
            raise self.dead_error

    async def learn_decisions(self) -> None:
        """It decides nothing."""

    async def change_placement(self, placement: Placement, mode: str = "wait") -> list[Any]:
        self.placement = dict(enumerate(expand(placement, 2)))
        return [self.placement]

    @asynccontextmanager
    async def one_placement(self) -> AsyncGenerator[str | None, None]:
        yield None

    async def collective_rpc(self, method: str, **kwargs: Any) -> list[Any]:
        if method in ("get_layer_placements", "get_mixer_names"):
            return [self.placement if method == "get_layer_placements" else ("gdn", "kda")]
        return [{"method": method, "kind": int, **kwargs}]

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return reset_running_requests or not self.running

    def unfinished_request_ids(self) -> list[str]:
        return sorted(self.running)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if level not in LEVELS or mode not in ("abort", "wait"):
            raise VLLMValidationError("no such level or mode", "level", level)
        self.asleep = True

    async def wake_up(self, tags: list[str] | None = None) -> None:
        check_tags(tags)
        self.asleep = False

    async def is_sleeping(self) -> bool:
        return self.asleep

    def shutdown(self, timeout: float | None = None) -> None:
        self.shut_down = True

    async def generate(
        self,
        prompt: dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.dead:
            raise self.dead_error
        for asked in (sampling_params.logprobs, sampling_params.prompt_logprobs):
            if asked is not None and asked > MAX_LOGPROBS:
                raise VLLMValidationError(f"at most {MAX_LOGPROBS} logprobs per token", "logprobs")
        self.calls.append(Call(prompt, sampling_params, request_id, kwargs))
        self.running.add(request_id)
        finished = False
        try:
            async for output in self._outputs(prompt, sampling_params, request_id):
                finished = output.finished
                yield output
        finally:
            self.running.discard(request_id)
            if not finished:
                self.aborted.append(request_id)

    async def _outputs(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt_ids = prompt["prompt_token_ids"]
        sentence = byte_ids(SENTENCE)
        assert params.max_tokens is not None
        tokens = [sentence[i % len(sentence)] for i in range(params.max_tokens)]
        texts = spread_text(tokens)
        delta = params.output_kind is RequestOutputKind.DELTA
        pieces = [(i, i + 1) for i in range(len(tokens))] if delta else [(0, len(tokens))]
        for start, end in pieces:
            await self._interfere(start)
            last = end == len(tokens)
            outputs = [
                self._piece(n, tokens[start:end], "".join(texts[start:end]), params, last)
                for n in range(params.n)
            ]
            yield RequestOutput(
                request_id=request_id,
                prompt=prompt.get("prompt"),
                prompt_token_ids=prompt_ids,
                prompt_logprobs=self._prompt_logprobs(prompt_ids, params) if start == 0 else None,
                outputs=outputs,
                finished=last,
                num_cached_tokens=min(4, len(prompt_ids)),
                kv_transfer_params=join_kv_transfer_params(outputs),
            )

    async def _interfere(self, done: int) -> None:
        await asyncio.sleep(0)
        if self.fail_after is not None and done >= self.fail_after:
            raise self.error
        if self.hang_after is not None and done >= self.hang_after:
            self.num_hung += 1
            await asyncio.Event().wait()

    def _piece(
        self, index: int, tokens: list[int], text: str, params: SamplingParams, last: bool
    ) -> CompletionOutput:
        logprobs = None
        if params.logprobs is not None:
            logprobs = [self._position(token, params.logprobs) for token in tokens]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tokens,
            cumulative_logprob=None,
            logprobs=logprobs,
            finish_reason="length" if last else None,
            stop_reason=None,
            kv_transfer_params=self._connector_reply(params, index) if last else None,
            num_drafts=self._drafts(params) if last else None,
        )

    @staticmethod
    def _drafts(params: SamplingParams) -> tuple[int, int] | None:
        """As many as the request says (`vllm_xargs`)."""
        told = (params.extra_args or {}).get("drafted")
        return None if told is None else (told[0], told[1])

    def _prompt_logprobs(
        self, ids: list[int], params: SamplingParams
    ) -> list[dict[int, Logprob] | None] | None:
        if params.prompt_logprobs is None:
            return None
        return [None, *(self._position(token, params.prompt_logprobs) for token in ids[1:])]

    def _position(self, token: int, num_top: int) -> dict[int, Logprob]:
        """The token itself at rank 1, then its successors; the last one has no probability."""
        tokenizer = self.tokenizer
        ids = [(token + i) % 256 for i in range(max(1, num_top))]
        return {
            t: Logprob(
                logprob=-0.5 - i if i < 4 else -math.inf,
                rank=i + 1,
                decoded_token=None if tokenizer is None else tokenizer.decode([t]),
            )
            for i, t in enumerate(ids)
        }

    def _connector_reply(self, params: SamplingParams, index: int) -> dict[str, Any] | None:
        given = (params.extra_args or {}).get("kv_transfer_params")
        return None if given is None else {"path": f"/{index}", "got": given}


def byte_ids(text: str) -> list[int]:
    """Token ids of `text` in `byte_tokenizer`."""
    ids: list[int] = byte_tokenizer().encode(text)
    return ids


def spread_text(tokens: list[int]) -> list[str]:
    """The text each token adds: a character appears with its last byte."""
    tokenizer = byte_tokenizer()
    texts, begin = [], 0
    for end in range(1, len(tokens) + 1):
        new = tokenizer.decode(tokens[begin:end])
        if new.endswith("\ufffd"):
            new = ""
        else:
            begin = end
        texts.append(new)
    return texts
