# SPDX-License-Identifier: Apache-2.0
"""OpenAI chat messages as the plain conversation that chat templates expect."""

import json
import os
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import ContentFormat, parse_template, resolve_chat_template

#: older name, still imported by clients
resolve_hf_chat_template = resolve_chat_template

#: keys of a message that are checked and given the form of templates; others pass as they are
_CHECKED_KEYS = ("role", "content", "reasoning", "reasoning_content", "tool_calls")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def load_chat_template(chat_template: str | os.PathLike[str] | None) -> str | None:
    """The text of a template given as a path or as inline Jinja; None stays None.

    Raises `VLLMValidationError` when it is neither a readable file nor Jinja: what a server or an
    `LLM` starts with would fail every conversation.
    """
    if chat_template is None:
        return None
    text = os.fspath(chat_template)
    if any(mark in text for mark in ("{{", "{%", "{#", "\n")):
        parse_template(text)
        return text
    try:
        with open(text, encoding="utf-8") as file:
            content = file.read()
    except OSError as error:
        raise VLLMValidationError(
            f"chat template {text!r} is neither inline Jinja nor a readable file: {error.strerror}",
            parameter="chat_template",
        ) from None
    parse_template(content)
    return content


def parse_chat_messages(
    messages: list[dict[str, Any]],
    content_format: ContentFormat = "string",
    arguments_as_text: bool = False,
) -> list[dict[str, Any]]:
    """The conversation for a template that takes contents as one string, or as OpenAI parts, and
    the arguments of calls as an object, or as JSON text. Keys that the API does not know are
    the template's, as in transformers.

    Raises `VLLMValidationError` naming the message for anything malformed or not text.
    """
    return [
        _parse_message(f"messages.{index}", message, content_format, arguments_as_text)
        for index, message in enumerate(messages)
    ]


def message_text(message: dict[str, Any]) -> str:
    """The content of a message as one string."""
    return str(parse_content("content", message.get("content"), "string"))


def _fail(where: str, message: str) -> VLLMValidationError:
    return VLLMValidationError(f"{where}: {message}", parameter=where)


def _parse_message(
    where: str,
    message: dict[str, Any],
    content_format: ContentFormat,
    arguments_as_text: bool,
) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _fail(where, f"a message must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _fail(f"{where}.role", "every message needs a role, a non-empty string")
    content = message.get("content")
    tool_calls = message.get("tool_calls")
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if content is None and not tool_calls and not reasoning and role != "assistant":
        raise _fail(f"{where}.content", f"a {role} message needs content")
    # Templates have names of their own (`functions` of OLMo); to clients null means no value.
    parsed = {k: v for k, v in message.items() if v is not None and k not in _CHECKED_KEYS}
    parsed["role"] = role
    parsed["content"] = parse_content(f"{where}.content", content, content_format)
    if reasoning:
        if not isinstance(reasoning, str):
            raise _fail(f"{where}.reasoning", "reasoning must be a string")
        parsed["reasoning"] = parsed["reasoning_content"] = reasoning
        # gpt-oss's template has a name of its own for it, and room for one text beside a call.
        parsed["thinking"] = "" if tool_calls and parsed["content"] else reasoning
    for key in ("name", "tool_call_id"):
        if key in parsed:
            parsed[key] = str(parsed[key])
    if tool_calls:
        parsed["tool_calls"] = _parse_tool_calls(
            f"{where}.tool_calls", tool_calls, arguments_as_text
        )
    return parsed


def parse_content(where: str, content: Any, content_format: ContentFormat) -> Any:
    """Content as one string or as OpenAI text parts; errors name `where`."""
    if content is None:
        return "" if content_format == "string" else []
    if isinstance(content, str):
        return content if content_format == "string" else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _fail(where, "content must be a string or a list of parts")
    texts = [_part_text(f"{where}.{index}", part) for index, part in enumerate(content)]
    if content_format == "string":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _fail(where, "a content part must be an object or a string")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise _fail(where, f"content part type {kind!r} is not supported; only text parts are")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _fail(where, f"a {kind} part needs the string field {_TEXT_PARTS[kind]!r}")
    return text


def _parse_tool_calls(where: str, tool_calls: Any, as_text: bool) -> list[dict[str, Any]]:
    """Earlier calls as the template wants them: `arguments` an object, or JSON text."""
    if not isinstance(tool_calls, list):
        raise _fail(where, "tool_calls must be a list")
    parsed = []
    for index, call in enumerate(tool_calls):
        at = f"{where}.{index}.function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _fail(at, "a tool call needs a function with a name")
        written = function.get("arguments")
        arguments: Any = parse_arguments(f"{at}.arguments", written)
        if as_text:
            given = isinstance(written, str) and written
            arguments = given or json.dumps(arguments, ensure_ascii=False)
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def parse_arguments(where: str, arguments: Any) -> dict[str, Any]:
    """The arguments of a call, given as an object or as its JSON text; errors name `where`."""
    arguments = arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _fail(where, "arguments must be JSON text") from None
    if not isinstance(arguments, dict):
        raise _fail(where, "arguments must be a JSON object")
    return arguments
