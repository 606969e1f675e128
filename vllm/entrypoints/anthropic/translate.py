# SPDX-License-Identifier: Apache-2.0
"""A message request as the chat request that means the same."""

from typing import Any

from vllm.entrypoints.anthropic.protocol import CountTokensRequest
from vllm.entrypoints.openai.chat_turn import chat_request, free_text_format, joined_system
from vllm.entrypoints.openai.protocol.base import refuse
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest

#: fields of the chat API -> where their values come from here
PARAMETERS = {"response_format": "output_config.format", "stop": "stop_sequences"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "disabled": False, "adaptive": None}
_ERROR = "Error: "


def to_chat(request: CountTokensRequest, can_reason: bool) -> ChatCompletionRequest:
    """The chat request, without `max_tokens`; raises `VLLMValidationError` naming the field that
    cannot be honoured.

    `can_reason`: whether the server separates reasoning from text.
    """
    request.check_fields()
    messages = _messages(request)
    continues = messages[-1]["role"] == "assistant"
    choice = request.tool_choice or {}
    config = request.output_config
    omitted = request.thinking is not None and request.thinking.display == "omitted"
    tool_choice = _tool_choice(choice) if choice else None
    response_format = _response_format(config.format) if config and config.format else None
    translated = {
        "messages": messages,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "stop": request.stop_sequences,
        "tools": [_tool(f"tools.{i}", tool) for i, tool in enumerate(request.tools or [])] or None,
        "tool_choice": tool_choice,
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
        "response_format": free_text_format(tool_choice, response_format),
        "reasoning_effort": config.effort if config else None,
        "include_reasoning": not omitted,
        "chat_template_kwargs": _template_kwargs(request, can_reason),
        "user": request.metadata.user_id if request.metadata else None,
    }
    # The prompt decides how many tokens are left; see `ServingMessages.create`.
    return chat_request(request, translated).model_copy(update={"max_tokens": None})


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text("system", request.system)})
    if not request.messages:
        refuse("messages", "messages must hold at least one message")
    for index, message in enumerate(request.messages):
        where = f"messages.{index}"
        role, content = message.get("role"), message.get("content")
        if role == "system":
            messages.append({"role": role, "content": _text(f"{where}.content", content)})
        elif role == "user":
            messages += _user_messages(f"{where}.content", content)
        elif role == "assistant":
            messages.append(_assistant_message(f"{where}.content", content))
        else:
            refuse(f"{where}.role", f"role {role!r} is not one of user, assistant, system")
    if messages[-1].get("tool_calls"):
        refuse("messages", "the last message calls tools; answer with a tool_result for each call")
    return joined_system(messages)


def _user_messages(where: str, content: Any) -> list[dict[str, Any]]:
    """Each tool result is a message of its own, and so is the text between and after them."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for at, block in _blocks(where, content):
        if block.get("type") == "tool_result":
            messages += _user_text(parts)
            parts = []
            text = _text(f"{at}.content", block.get("content") or "")
            if block.get("is_error"):
                text = _ERROR + text
            call_id = _field(at, block, "tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            parts.append(_text_part(at, block))
    messages += _user_text(parts)
    if not messages:
        refuse(where, "the content is empty")
    return messages


def _user_text(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": parts}] if parts else []


def _assistant_message(where: str, content: Any) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in _blocks(where, content):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_field(at, block, "thinking"))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                refuse(f"{at}.input", "input must be a JSON object")
            function = {"name": _field(at, block, "name"), "arguments": arguments}
            call_id = _field(at, block, "id")
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            texts.append(_text_part(at, block)["text"])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(where: str, content: Any) -> list[tuple[str, dict[str, Any]]]:
    """The blocks of a content, each with its name for errors."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        refuse(where, "content must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            refuse(f"{where}.{index}", "a content block must be an object")
    return [(f"{where}.{index}", block) for index, block in enumerate(content)]


def _text_part(where: str, block: dict[str, Any]) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "redacted_thinking":
        refuse(where, "redacted_thinking was encrypted by another server; leave the block out")
    if kind != "text":
        refuse(
            f"{where}.type",
            f"content block type {kind!r} is not supported here; only text, and thinking, tool_use "
            "and tool_result blocks in the messages that they belong to",
        )
    return {"type": "text", "text": _field(where, block, "text")}


def _text(where: str, content: Any) -> str:
    return "\n".join(_text_part(at, block)["text"] for at, block in _blocks(where, content))


def _field(where: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        refuse(f"{where}.{name}", f"{where} needs the string field {name!r}")
    return value


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        refuse(
            f"{where}.type",
            f"tool type {kind!r} is not supported: no tool runs on this server and the model knows "
            "no tool by its type; describe it with name, description and input_schema",
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        refuse(f"{where}.input_schema", "input_schema must be a JSON schema, an object")
    function = {"name": _field(where, tool, "name"), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = _field(where, tool, "description")
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> str | dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": _field("tool_choice", choice, "name")}}
    if kind not in _CHOICES:
        refuse("tool_choice.type", f"{kind!r} is not one of {', '.join(_CHOICES)}, tool")
    return _CHOICES[kind]


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        refuse("output_config.format.type", 'only "json_schema" is supported')
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


def _template_kwargs(request: CountTokensRequest, can_reason: bool) -> dict[str, Any] | None:
    """Thinking is switched by the template's variable; "adaptive" leaves it to the template."""
    thinking = None if request.thinking is None else _THINKING[request.thinking.type]
    if thinking and not can_reason:
        refuse(
            "thinking",
            "this server cannot tell thinking from text; start it with --reasoning-parser, or "
            'leave `thinking` out or "disabled"',
        )
    given = request.chat_template_kwargs
    return given if thinking is None else {"enable_thinking": thinking, **(given or {})}
