# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/responses`."""

from typing import Any, Literal

import msgspec

from vllm.entrypoints.openai.chat_turn import CHAT_ONLY, refuse_fields
from vllm.entrypoints.openai.protocol.base import (
    Integer,
    Objects,
    ReplyModel,
    RequestModel,
    Strings,
    refuse,
)
from vllm.entrypoints.openai.protocol.sampling import GenerationRequest

_STATELESS = "nothing is stored here: send the whole conversation in `input`"
#: fields that this server cannot honour -> what to do instead
_INSTEAD = {
    **CHAT_ONLY,
    "max_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "store": f"{_STATELESS}, and store=false or no `store`",
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": "replies are not kept for later; use stream=true for a long one",
    "prompt": "no prompt templates are stored here; put the text into `instructions` and `input`",
    "context_management": "shorten `input` in the client",
    "moderation": "check texts in the client",
}
_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
#: what else clients may name in `include`: it belongs to items that never occur here
_OTHER_INCLUDES = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


class TextConfig(RequestModel):
    """The form of the text: `format` is a `response_format` without the inner object."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(RequestModel):
    """How the model reasons, as far as its chat template knows about it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(GenerationRequest):
    """Body of a response request; the sampling fields of the chat API work here, too."""

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Strings | None = None
    top_logprobs: Integer | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: Objects | None = None
    moderation: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return _REASONING in (self.include or ())

    def check_fields(self) -> None:
        """Raise `VLLMValidationError` for a field this server cannot honour."""
        refuse_fields(self, _INSTEAD)
        if self.truncation not in (None, "disabled"):
            refuse("truncation", 'only "disabled" is supported; shorten `input` in the client')
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            refuse("text.verbosity", "not supported; ask for short or long text in `instructions`")
        known = (_REASONING, _LOGPROBS, *_OTHER_INCLUDES)
        for name in self.include or ():
            if name not in known:
                refuse("include", f"{name!r} is not known; known: {', '.join(known)}")
        if self.reasoning is not None:
            summary = self.reasoning.summary or self.reasoning.generate_summary
            if summary not in (None, "auto"):
                refuse(
                    "reasoning.summary",
                    f"{summary!r} is not supported: the reasoning itself comes as the item's "
                    'content; use "auto" or leave it out',
                )


class InputTokensDetails(msgspec.Struct):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, omit_defaults=True):
    """How many tokens the reasoning text has; and, of a reply that had drafts, how many tokens a
    drafter proposed that became output, and how many that did not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class ResponseUsage(msgspec.Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, in its reply and in the events that carry it as a whole.

    What is repeated from the request may be large and is sent several times: it is encoded once.
    """

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: msgspec.Raw


class InputTokens(ReplyModel):
    """How many tokens the prompt of a request has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
