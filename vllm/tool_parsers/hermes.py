# SPDX-License-Identifier: Apache-2.0
"""Calls as JSON between `<tool_call>` tags: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

import enum

from vllm.tool_parsers.base import ToolParser, ToolSchemas
from vllm.tool_parsers.json_call import CallReader, CallState
from vllm.utils.text_tags import skip_tag, split_held

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class _Where(enum.Enum):
    CONTENT = enum.auto()
    CALL = enum.auto()
    BEHIND_CALL = enum.auto()


class HermesToolParser(ToolParser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them.

    A forgotten closing tag or brace does not lose a call whose arguments are there.
    """

    tags = (_OPEN, _CLOSE)

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._where = _Where.CONTENT
        self._pending = ""
        self._call = CallReader(self.reply, "arguments")

    def _consume(self, text: str) -> None:
        self._pending += text
        steps = {
            _Where.CONTENT: self._read_content,
            _Where.CALL: self._read_call,
            _Where.BEHIND_CALL: self._read_behind,
        }
        while self._pending and steps[self._where]():
            pass

    def _read_content(self) -> bool:
        """Up to the next opening tag; False when more text is needed to go on (as below)."""
        content, tag, rest = self._pending.partition(_OPEN)
        if not tag:
            content, self._pending = split_held(content, (_OPEN,))
            self.reply.say(content)
            return False
        self.reply.say(content)
        self._pending = rest
        self._call = CallReader(self.reply, "arguments")
        self._where = _Where.CALL
        return True

    def _read_call(self) -> bool:
        size = self._call.feed(self._pending)
        self._pending = self._pending[size:]
        if self._call.state is CallState.OPEN:
            return False
        if self._call.state is CallState.REFUSED:
            self.reply.say(_OPEN + self._call.raw)
            self._where = _Where.CONTENT
        else:
            self._where = _Where.BEHIND_CALL
        return True

    def _read_behind(self) -> bool:
        rest = skip_tag(self._pending, _CLOSE)
        if rest is None:
            return False
        self._pending = rest
        self._where = _Where.CONTENT
        return True

    def _flush(self) -> None:
        if self._where is _Where.CONTENT:
            self.reply.say(self._pending)
        elif self._where is _Where.CALL and not self._call.started:
            self.reply.say(_OPEN + self._call.raw)
