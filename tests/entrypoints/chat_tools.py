# SPDX-License-Identifier: Apache-2.0
"""Chat requests with tools: the tools, what a model says to call them, and asking for it."""

from __future__ import annotations

from typing import Any

import openai

HI: list = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city"],
    "$defs": {"Days": {"type": "integer"}},
}
TOOLS: list = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: dict = {"type": "function", "function": {"name": "weather"}}
HERMES = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
LIST = (
    '[{"name": "weather", "parameters": {"city": "Köln", "days": 2}},\n'
    ' {"name": "now", "parameters": {}}]'
)
CALLS = [("weather", '{"city": "Köln", "days": 2}'), ("now", "{}")]


def auto(parser: str, **more: Any) -> dict[str, Any]:
    return {"enable_auto_tool_choice": True, "tool_call_parser": parser, **more}


async def ask(api: openai.AsyncOpenAI, **body: Any) -> Any:
    """The first choice of a reply."""
    reply = await api.chat.completions.create(**{"model": "fake", "messages": HI, **body})
    return reply.choices[0]


async def ask_streaming(api: openai.AsyncOpenAI, **body: Any) -> Any:
    """The first choice of a stream, put together by the client library."""
    async with api.chat.completions.stream(**{"model": "fake", "messages": HI, **body}) as stream:
        return (await stream.get_final_completion()).choices[0]


async def chunks_of(api: openai.AsyncOpenAI, **body: Any) -> list[Any]:
    """Every chunk's first choice."""
    body = {"model": "fake", "messages": HI, "stream": True, **body}
    return [chunk.choices[0] async for chunk in await api.chat.completions.create(**body)]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
