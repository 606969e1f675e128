# SPDX-License-Identifier: Apache-2.0
"""From a user's prompt and parameters to a request the core need not check again."""

from __future__ import annotations

import copy
import re
import secrets
import string
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm import envs
from vllm.config.speculative import DRAFTS_KEY
from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest, check_no_lora
from vllm.sampling_params import INTERNAL_FIELDS, SamplingParams
from vllm.sampling_validation import PRIORITY, check_some_token_is_left
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.prompt_checks import (
    ParsedPrompt,
    check_token_ids,
    parse_prompt,
    truncated,
)
from vllm.v1.structured_output.validation import StructuredOutputValidator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.config import VllmConfig

#: of ids inside the engine, which connectors use as file names and keys
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_CHARS = 128
_ALPHABET = string.ascii_lowercase + string.digits

_TOKENIZATION_KEYS = (
    "add_special_tokens",
    "truncation",
    "max_length",
    "truncate_prompt_tokens",
    "truncation_side",
)
#: of one word: each of its tokens is compared at every step
MAX_CHARS = 512


@dataclass(frozen=True)
class ProcessedInput:
    """A validated request and the prompt's text, which the core never sees."""

    request: EngineCoreRequest
    prompt_text: str | None


class InputProcessor:
    """Tokenises and validates; every error is a `VLLMValidationError` naming the parameter."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        assert vllm_config.model_config is not None
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.tokenizer = tokenizer
        self._vocab_size = self.model_config.get_vocab_size()
        self._generation_config = self.model_config.try_get_generation_config()
        self._eos_token_id = self._find_eos()
        self._constraints = StructuredOutputValidator(
            tokenizer, self._vocab_size, vllm_config.structured_outputs_config
        )

    def _find_eos(self) -> int | None:
        """The tokenizer's end-of-sequence id; without a tokenizer the checkpoint's first."""
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            return int(self.tokenizer.eos_token_id)
        found = self._generation_config.get("eos_token_id")
        if found is None:
            found = self.model_config.hf_text_config.eos_token_id
        if isinstance(found, list):
            found = found[0] if found else None
        return found

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        data_parallel_rank: int | None = None,
    ) -> ProcessedInput:
        """`request_id` is the caller's; the engine's is derived from it."""
        check_no_lora(lora_request)
        self._check_rank(data_parallel_rank)
        self._check_scalars(request_id, priority, params)
        parsed = parse_prompt(prompt)
        token_ids = self.tokenize(parsed, tokenization_kwargs, params.max_tokens)
        check_token_ids(token_ids, self._vocab_size, self.max_model_len)
        request = EngineCoreRequest(
            request_id=make_internal_id(request_id),
            prompt_token_ids=token_ids,
            sampling_params=self._finish_params(params, len(token_ids)),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            eos_token_id=self._eos_token_id,
            priority=priority,
            cache_salt=cache_salt or parsed.cache_salt,
            cache=parsed.cache,
            trace_headers=None if trace_headers is None else dict(trace_headers),
            data_parallel_rank=data_parallel_rank,
        )
        _check_can_travel(request)
        return ProcessedInput(request, parsed.text)

    @property
    def max_model_len(self) -> int:
        return self.model_config.max_model_len

    def _check_scalars(self, request_id: str, priority: int, params: SamplingParams) -> None:
        if not isinstance(request_id, str):
            raise VLLMValidationError(
                f"request_id must be a string, got {request_id!r}", "request_id", request_id
            )
        if not isinstance(params, SamplingParams):
            raise VLLMValidationError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                "sampling_params",
            )
        PRIORITY.check("priority", priority)
        if priority != 0 and self.vllm_config.scheduler_config.policy != "priority":
            raise VLLMValidationError(
                f"priority {priority} needs --scheduling-policy priority", "priority", priority
            )

    def _check_rank(self, rank: int | None) -> None:
        here = self.vllm_config.parallel_config.local_ranks
        if rank is not None and (type(rank) is not int or rank not in here):
            raise VLLMValidationError(
                f"data_parallel_rank must be a replica of this server, {here[0]} to {here[-1]}, "
                f"got {rank!r}",
                "data_parallel_rank",
                rank,
            )

    # ---- tokens --------------------------------------------------------------------------------

    def tokenize(
        self,
        prompt: ParsedPrompt,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        max_output_tokens: int | None = None,
    ) -> list[int]:
        """The prompt's token ids, truncated if asked; else given ids pass unchanged."""
        options = dict(tokenization_kwargs or {})
        unknown = sorted(set(options) - set(_TOKENIZATION_KEYS))
        if unknown:
            raise VLLMValidationError(
                f"unknown tokenization_kwargs {unknown}; known: {', '.join(_TOKENIZATION_KEYS)}",
                "tokenization_kwargs",
            )
        keep = options.pop("truncate_prompt_tokens", None)
        side = options.pop("truncation_side", None)
        if prompt.token_ids is not None:
            token_ids = prompt.token_ids
        else:
            token_ids = self._encode(prompt.text or "", options)
        return truncated(token_ids, keep, self.max_model_len, max_output_tokens, side)

    def _encode(self, text: str, options: dict[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise VLLMValidationError(
                "text prompts need a tokenizer, but --skip-tokenizer-init is set; send token ids",
                parameter="prompt",
            )
        try:
            return list(self.tokenizer.encode(text, **options))
        except (UnicodeEncodeError, TypeError) as error:
            raise VLLMValidationError(
                f"the prompt cannot be tokenised: {error}", parameter="prompt"
            ) from error

    # ---- parameters ----------------------------------------------------------------------------

    def _finish_params(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A checked copy with everything the engine needs filled in."""
        self._check_params(params)
        params = params.shallow_copy()
        params.extra_args = copy.deepcopy(params.extra_args)
        room = self.max_model_len - num_prompt_tokens
        if params.max_tokens is None:
            params.max_tokens = room
        if params.min_tokens > room:
            raise VLLMValidationError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you "
                f"requested at least {params.min_tokens} output tokens (min_tokens) after "
                f"{num_prompt_tokens} tokens in the prompt.",
                "min_tokens",
                params.min_tokens,
            )
        if params.seed is None:
            params.seed = secrets.randbits(63)
        params.update_from_generation_config(self._generation_config, self._eos_token_id)
        if params.bad_words:
            params.bad_words_token_ids = bad_word_token_ids(params.bad_words, self.tokenizer)
        check_some_token_is_left(params, self._vocab_size)
        if params.structured_outputs is not None:
            params.structured_outputs = copy.copy(params.structured_outputs)
            self._constraints.finish(params)
        return params

    def _check_params(self, params: SamplingParams) -> None:
        for name in INTERNAL_FIELDS:
            if getattr(params, name) is not None:
                raise VLLMValidationError(f"{name} is filled in by the engine", name)
        self._check_connector(params)
        self._check_drafts(params)
        self._check_logprobs("logprobs", params.logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        self._check_in_vocabulary("logit_bias", params.logit_bias or ())
        self._check_in_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_in_vocabulary("stop_token_ids", params.stop_token_ids or ())
        if self.tokenizer is None and params.detokenize and (params.stop or params.bad_words):
            raise VLLMValidationError(
                "stop strings and bad_words need a tokenizer, but --skip-tokenizer-init is set; "
                "use stop_token_ids or logit_bias",
                "stop",
            )

    def _check_connector(self, params: SamplingParams) -> None:
        asked = (params.extra_args or {}).get("kv_transfer_params")
        if not asked:
            return
        transfer = self.vllm_config.kv_transfer_config
        if transfer is None or not transfer.is_kv_transfer_instance:
            raise VLLMValidationError(
                "kv_transfer_params are for a KV connector, and the engine runs without one; start "
                "it with --kv-transfer-config or leave them out",
                "kv_transfer_params",
            )
        if not isinstance(asked, dict):
            raise VLLMValidationError(
                f"kv_transfer_params must be an object, got {type(asked).__name__}",
                "kv_transfer_params",
            )
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        connector_class = KVConnectorFactory.get_connector_class(transfer)
        try:
            connector_class.check_request(transfer, asked, params.n)
        except ValueError as error:
            raise VLLMValidationError(str(error), "kv_transfer_params") from error

    def _check_drafts(self, params: SamplingParams) -> None:
        drafts = (params.extra_args or {}).get(DRAFTS_KEY)
        if drafts is None:
            return
        drafter = self.vllm_config.drafter
        if drafter is None or not drafter.brought_by_requests:
            raise VLLMValidationError(
                f"{DRAFTS_KEY} are for a drafter that takes them, and the engine runs without one; "
                "start it with --speculative-config method replay or leave them out",
                DRAFTS_KEY,
            )
        if not isinstance(drafts, list) or any(type(token) is not int for token in drafts):
            raise VLLMValidationError(f"{DRAFTS_KEY} must be a list of token ids", DRAFTS_KEY)
        self._check_in_vocabulary(DRAFTS_KEY, drafts)

    def _check_logprobs(self, name: str, asked: int | None) -> None:
        limit = self.model_config.max_logprobs
        if asked is None or limit == -1:
            return
        wanted = self._vocab_size if asked == -1 else asked
        if wanted > limit:
            raise VLLMValidationError(
                f"{name} asks for {wanted} alternatives per token; the server allows {limit} "
                "(--max-logprobs)",
                name,
                asked,
            )

    def _check_in_vocabulary(self, name: str, token_ids: Collection[int]) -> None:
        if not token_ids:
            return
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise VLLMValidationError(
                    f"{name}: token id {token_id} is outside the vocabulary "
                    f"[0, {self._vocab_size})",
                    name,
                    token_id,
                )


def make_internal_id(external_id: str) -> str:
    """The caller's id with unsafe characters replaced, cut to 128, and 8 random characters added
    (none with `VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1`)."""
    safe = _UNSAFE.sub("_", external_id)[:_MAX_CHARS]
    if safe in ("", ".", ".."):
        safe = f"request{safe.replace('.', '_')}"
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        return safe
    return f"{safe}-{''.join(secrets.choice(_ALPHABET) for _ in range(8))}"


def _check_can_travel(request: EngineCoreRequest) -> None:
    """Raise `VLLMValidationError` naming what the engine's process could not be sent: text that is
    no Unicode, integers of more than 64 bits, objects that are no data."""
    parts = {
        "sampling_params": request.sampling_params,
        "cache_salt": request.cache_salt,
        "trace_headers": request.trace_headers,
    }
    for name, part in parts.items():
        try:
            msgspec.msgpack.encode(part)
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise VLLMValidationError(
                f"{name} cannot be sent to the engine: {error}", name
            ) from None


def bad_word_token_ids(
    words: Iterable[str], tokenizer: PreTrainedTokenizerBase | None
) -> list[list[int]]:
    """The sequences whose last token is banned after the others: each word as the text's start
    and after a space, unless the one ends with the other.

    Raises `VLLMValidationError` without a tokenizer, for a word without tokens and for one longer
    than `MAX_CHARS`.
    """
    if tokenizer is None:
        raise VLLMValidationError(
            "bad_words need a tokenizer, but --skip-tokenizer-init is set; use logit_bias",
            "bad_words",
        )
    words = [word.lstrip() for word in words]
    for word in words:
        if len(word) > MAX_CHARS:
            raise VLLMValidationError(
                f"bad_words: {word[:20]!r}… has {len(word)} characters; at most {MAX_CHARS}",
                "bad_words",
            )
    spaced_words = [" " + word for word in words]
    try:
        encoded = tokenizer([*words, *spaced_words], add_special_tokens=False)["input_ids"]
    except (UnicodeEncodeError, TypeError) as error:
        raise VLLMValidationError(f"bad_words cannot be tokenised: {error}", "bad_words") from None
    sequences: list[list[int]] = []
    for word, bare, spaced in zip(words, encoded, encoded[len(words) :], strict=False):
        if not bare:
            raise VLLMValidationError(f"bad_words: {word!r} has no tokens", "bad_words", word)
        sequences.append(list(bare))
        if spaced[-len(bare) :] != bare:
            sequences.append(list(spaced))
    return sequences
