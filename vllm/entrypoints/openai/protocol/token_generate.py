# SPDX-License-Identifier: Apache-2.0
"""Bodies about token ids: `/inference/v1/generate`, `/tokenize`, `/detokenize`, render routes."""

from typing import Any

from vllm.entrypoints.openai.protocol.base import (
    Integer,
    Integers,
    JsonObject,
    Objects,
    ReplyModel,
    RequestModel,
    StreamOptions,
)
from vllm.entrypoints.openai.protocol.chat import ConversationFields


class TokenizeRequest(ConversationFields):
    """A text or a conversation to tokenise.

    Special tokens are added to a text unless switched off; a chat template supplies its own.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Objects = []
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class TokenizeResponse(ReplyModel):
    """Token ids and, when asked, their pieces."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Integers


class DetokenizeResponse(ReplyModel):
    """The text of the given ids, special tokens included."""

    prompt: str


class RenderResponse(ReplyModel):
    """What a generation request would hand to the engine."""

    request_id: str
    token_ids: list[int]
    features: dict[str, Any] | None = None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None


#: what a client may set of `SamplingParams`; the route itself decides what the output looks like
SAMPLING_FIELDS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "extra_args",
        "flat_logprobs",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "placement",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "seed",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
    }
)


class TokenGenerateRequest(RequestModel):
    """What the render routes reply with; of `sampling_params` the `SAMPLING_FIELDS` count."""

    token_ids: Integers
    sampling_params: JsonObject
    request_id: str | None = None
    features: dict[str, Any] | None = None
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Integer | None = 0
    kv_transfer_params: JsonObject | None = None


class TokenChoice(ReplyModel):
    """One completion as token ids."""

    index: int
    token_ids: list[int]
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TokenGenerateResponse(ReplyModel):
    """Reply of a token generation request."""

    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None
