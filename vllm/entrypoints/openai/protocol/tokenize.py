# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/tokenize`, `/detokenize` and the two render routes."""

from typing import Any

from vllm.entrypoints.openai.protocol.base import Integers, Objects, ReplyModel, RequestModel
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
