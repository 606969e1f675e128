# SPDX-License-Identifier: Apache-2.0
"""Calls as JSON between `<tool_call>` tags: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from vllm.tool_parsers.base import ToolSchemas
from vllm.tool_parsers.json_call import CallReader, CallState
from vllm.tool_parsers.tagged_calls import OPEN, TaggedCallParser
from vllm.utils.text_tags import split_held


class _Where(enum.Enum):
    CONTENT = enum.auto()
    CALL = enum.auto()
    BEHIND_CALL = enum.auto()


class HermesToolParser(TaggedCallParser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them.

    A forgotten closing tag or brace does not lose a call whose arguments are there.
    """

    _content = _Where.CONTENT

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._call = CallReader(self.reply, "arguments")

    def _steps(self) -> Mapping[enum.Enum, Callable[[], bool]]:
        return {
            _Where.CONTENT: self._read_content,
            _Where.CALL: self._read_call,
            _Where.BEHIND_CALL: self._read_behind,
        }

    def _read_content(self) -> bool:
        """Up to the next opening tag; False when more text is needed to go on (as below)."""
        content, tag, rest = self._pending.partition(OPEN)
        if not tag:
            content, self._pending = split_held(content, (OPEN,))
            self.reply.say(content)
            return False
        self.reply.say(content)
        self._pending = rest
        self.reply.open_call(OPEN)
        self._call = CallReader(self.reply, "arguments")
        self._where = _Where.CALL
        return True

    def _read_call(self) -> bool:
        size = self._call.feed(self._pending)
        self._pending = self._pending[size:]
        if self._call.state is CallState.OPEN:
            return False
        if self._call.state is CallState.REFUSED:
            self.reply.say(OPEN + self._call.raw)
            self._where = _Where.CONTENT
        else:
            self._where = _Where.BEHIND_CALL
        return True

    def _flush(self) -> None:
        if self._where is _Where.CONTENT:
            self.reply.say(self._pending)
        elif self._where is _Where.CALL and not self._call.started:
            self.reply.say(OPEN + self._call.raw)
