# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/inference/v1/generate`: token ids in, token ids out."""

from typing import Any

from vllm.entrypoints.openai.protocol.base import (
    Integer,
    JsonObject,
    ReplyModel,
    RequestModel,
    StreamOptions,
)


class TokenGenerateRequest(RequestModel):
    """What the render routes reply with; `sampling_params` has the fields of `SamplingParams`."""

    token_ids: list[Integer]
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
