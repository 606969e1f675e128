# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from typing import Any, Literal

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

#: fields that this server cannot honour -> what to do instead
_INSTEAD = {
    **CHAT_ONLY,
    "stop": "use stop_sequences",
    "response_format": "use output_config.format",
    "container": "no code runs on this server; offer a tool and run it in the client",
    "mcp_servers": "connect to MCP servers in the client and offer their tools in `tools`",
    "context_management": "shorten `messages` in the client",
}


class Thinking(RequestModel):
    """Whether the model reasons before it answers; `budget_tokens` is accepted and bounds nothing:
    only `max_tokens` does."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(RequestModel):
    """`format` is a JSON schema that the text must follow."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class Metadata(RequestModel):
    """Who asks."""

    user_id: str | None = None


class CountTokensRequest(GenerationRequest):
    """What decides the prompt of a message; the sampling fields of the chat API work here, too."""

    messages: Objects
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    stop_sequences: Strings | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    container: str | dict[str, Any] | None = None
    mcp_servers: Objects | None = None
    context_management: dict[str, Any] | None = None

    def check_fields(self) -> None:
        """Raise `VLLMValidationError` for a field this server cannot honour."""
        refuse_fields(self, _INSTEAD)


class MessagesRequest(CountTokensRequest):
    """Body of a message request."""

    max_tokens: Integer

    def check_fields(self) -> None:
        super().check_fields()
        if self.max_tokens < 1:
            refuse("max_tokens", f"max_tokens must be at least 1, got {self.max_tokens}")
        if (self.min_tokens or 0) > self.max_tokens:
            refuse("min_tokens", f"min_tokens is above max_tokens, {self.max_tokens}")


class MessageUsage(ReplyModel):
    """Token counts of a message; the prompt's are `input_tokens` and those read from the cache.

    `output_tokens_details`, of what the reply had: `thinking_tokens`; `accepted_prediction_tokens`
    and `rejected_prediction_tokens`, which a drafter proposed and which became output or did not.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: dict[str, int] | None = None


class Message(ReplyModel):
    """A generated message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(ReplyModel):
    """How many tokens the prompt of a message request has."""

    input_tokens: int
