# SPDX-License-Identifier: Apache-2.0
"""A response request as the chat request that means the same."""

import base64
import binascii
from typing import Any

import msgspec
import pydantic_core

from vllm.entrypoints.chat_utils import parse_arguments, parse_content
from vllm.entrypoints.openai.chat_turn import chat_request, free_text_format, joined_system
from vllm.entrypoints.openai.protocol.base import refuse
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.tool_choice import tools_allowed_by

#: fields of the chat API -> where their values come from here
PARAMETERS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "prompt": "input",
}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def to_chat(request: ResponsesRequest) -> ChatCompletionRequest:
    """The chat request; raises `VLLMValidationError` naming the field that cannot be honoured."""
    request.check_fields()
    tools, choice = _tool_choice(request)
    asked_logprobs = request.wants_logprobs
    return chat_request(
        request,
        {
            "messages": _messages(request),
            # Only in pieces is it known which tokens belong to the text.
            "stream": bool(request.stream) or asked_logprobs,
            "max_tokens": request.max_output_tokens,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": request.parallel_tool_calls,
            "response_format": free_text_format(choice, _response_format(request)),
            "reasoning_effort": request.reasoning.effort if request.reasoning else None,
            "logprobs": asked_logprobs,
            "top_logprobs": request.top_logprobs if asked_logprobs else None,
            "chat_template_kwargs": request.chat_template_kwargs,
        },
    )


def repeated(request: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """The fields that the response repeats, encoded."""
    fields = {
        "text": {"format": (request.text and request.text.format) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "metadata": request.metadata or {},
    }
    return {
        name: msgspec.Raw(pydantic_core.to_json(value, inf_nan_mode="null"))
        for name, value in fields.items()
    }


def encode_reasoning(text: str) -> str:
    """Reasoning in the form of `encrypted_content`: for clients that only keep that field."""
    return base64.b64encode(text.encode()).decode()


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        refuse("input", "input must hold at least one item")
    history = _History()
    for index, item in enumerate(request.input):
        history.add(f"input.{index}", item)
    return joined_system(messages + history.messages)


class _History:
    """Collects input items as chat messages: an assistant's reasoning, text and calls that follow
    each other are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, where: str, item: dict[str, Any]) -> None:
        """Append `item`, which errors call `where`."""
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(where, item)
        elif kind == "reasoning":
            self._turn("reasoning", "content", "tool_calls")["reasoning"] = _reasoning(where, item)
        elif kind == "function_call":
            function = {
                "name": _text_field(where, item, "name"),
                "arguments": parse_arguments(f"{where}.arguments", item.get("arguments")),
            }
            call = {"id": _text_field(where, item, "call_id"), "type": "function"}
            calls = self._turn().setdefault("tool_calls", [])
            calls.append({**call, "function": function})
        elif kind == "function_call_output":
            output = parse_content(f"{where}.output", item.get("output"), "string")
            call_id = _text_field(where, item, "call_id")
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "item_reference":
            refuse(where, "nothing is stored here; send the item itself instead of its id")
        else:
            refuse(
                f"{where}.type",
                f"item type {kind!r} is not supported; use message, reasoning, function_call or "
                "function_call_output",
            )

    def _add_message(self, where: str, item: dict[str, Any]) -> None:
        given = item.get("role")
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            refuse(f"{where}.role", f"role {given!r} is not one of {', '.join(_ROLES)}")
        content = item.get("content")
        if content is None:
            refuse(f"{where}.content", f"a {given} message needs content")
        text = parse_content(f"{where}.content", content, "string")
        if role == "assistant":
            self._turn("content", "tool_calls")["content"] = text
        elif role == "system":
            self.messages.append({"role": role, "content": text})
        else:
            self.messages.append({"role": role, "content": content})

    def _turn(self, *ends: str) -> dict[str, Any]:
        """The assistant's message at the end; a new one if it has one of the keys `ends`."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(key in last for key in ends):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _reasoning(where: str, item: dict[str, Any]) -> str:
    """The text of a reasoning item: its content, else what `encode_reasoning` made, else its
    summary."""
    if item.get("content"):
        return _part_texts(f"{where}.content", item["content"])
    encoded = item.get("encrypted_content")
    if encoded is None:
        return _part_texts(f"{where}.summary", item.get("summary") or [])
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (TypeError, binascii.Error, UnicodeDecodeError):
        refuse(
            f"{where}.encrypted_content",
            "this reasoning was encrypted by another server; leave the item out",
        )


def _part_texts(where: str, parts: Any) -> str:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        refuse(where, "must be a list of objects with a text")
    return "\n".join(_text_field(f"{where}.{i}", part, "text") for i, part in enumerate(parts))


def _text_field(where: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        refuse(f"{where}.{name}", f"{where} needs the string field {name!r}")
    return value


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    given = request.text.format if request.text else None
    if given is None or given.get("type") != "json_schema":
        return given
    inner = {key: value for key, value in given.items() if key != "type"}
    return {"type": "json_schema", "json_schema": inner}


def _tool_choice(request: ResponsesRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """`tools` and `tool_choice` in the chat API's form."""
    given = request.tools or []
    tools = [_tool(f"tools.{index}", tool) for index, tool in enumerate(given)]
    choice = request.tool_choice
    if not isinstance(choice, dict):
        return tools or None, choice
    kind = choice.get("type")
    if kind == "function":
        name = _text_field("tool_choice", choice, "name")
        return tools or None, {"type": "function", "function": {"name": name}}
    if kind == "allowed_tools":
        return tools_allowed_by("tool_choice", tools, choice, lambda tool: tool.get("name"))
    refuse(
        "tool_choice",
        f'tool_choice of type {kind!r} is not supported; use "none", "auto", "required", '
        '{"type": "function", "name": ...} or {"type": "allowed_tools", ...}',
    )


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        refuse(
            f"{where}.type",
            f"tool type {kind!r} is not supported: no tool runs on this server; offer a tool of "
            'type "function" and run it in the client',
        )
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if key in tool}}
