# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/chat/completions`."""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from vllm.entrypoints.openai.protocol.base import (
    Integer,
    Objects,
    ReplyModel,
    RequestModel,
    Strings,
    UsageInfo,
    refuse,
)
from vllm.entrypoints.openai.protocol.sampling import GenerationRequest

#: fields that this server cannot honour -> what to do instead
_INSTEAD = {
    "audio": "only text is generated; leave it out",
    "web_search_options": "no tool runs on this server; offer a function and run it in the client",
    "moderation": "check texts in the client",
}


class ConversationFields(RequestModel):
    """What decides how messages become a prompt."""

    messages: Objects
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    tools: Objects | None = None
    reasoning_effort: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None

    def check_conversation(self) -> None:
        """Raise `VLLMValidationError` for contradictory or unsupported fields."""
        if not self.messages:
            refuse("messages", "messages must hold at least one message")
        if self.continue_final_message and self.add_generation_prompt:
            refuse(
                "continue_final_message",
                "add_generation_prompt and continue_final_message cannot both be true; set "
                "add_generation_prompt to false to continue the last message",
            )
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if getattr(self, name):
                refuse(name, f"{name} concerns images, audio or video; only text is supported")


class ChatCompletionRequest(ConversationFields, GenerationRequest):
    """Body of a chat completion request."""

    logprobs: bool | None = False
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None
    echo: bool | None = False
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    modalities: Strings | None = None
    verbosity: str | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def field_names(self) -> dict[str, str]:
        names = {**super().field_names(), "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def check_supported(self) -> None:
        super().check_supported()
        self.check_conversation()
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "top_logprobs needs logprobs=true")
        if self.modalities not in (None, ["text"]):
            refuse("modalities", 'only ["text"] is supported; only text is generated')
        if self.verbosity not in (None, "medium"):
            refuse("verbosity", "not supported; ask for short or long text in a system message")
        for name, instead in _INSTEAD.items():
            if getattr(self, name) is not None:
                refuse(name, f"{name} is not supported; {instead}")


class ChatMessage(ReplyModel):
    """The generated message; `tool_calls` is left out when empty."""

    role: str
    content: str | None = None
    refusal: str | None = None
    annotations: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    reasoning: str | None = None

    @model_serializer(mode="wrap")
    def _drop_empty_tool_calls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if not self.tool_calls:
            fields.pop("tool_calls", None)
        return fields


class ChatChoice(ReplyModel):
    """One generated message and how it ended."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(ReplyModel):
    """Reply of a chat completion request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cache_report: dict[str, Any] | None = None
