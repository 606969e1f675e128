# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/inference/v1/generate`: token ids in, token ids out."""

from typing import Any

from vllm.entrypoints.openai.protocol.base import (
    Integer,
    Integers,
    JsonObject,
    ReplyModel,
    RequestModel,
    StreamOptions,
)

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
