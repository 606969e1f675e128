# SPDX-License-Identifier: Apache-2.0
"""Calls as a JSON array between `<TOOLCALL>` tags: Nemotron Nano v2."""

from __future__ import annotations

import enum

from vllm.tool_parsers.base import ToolParser, ToolSchemas
from vllm.tool_parsers.json_call import CallReader, CallState
from vllm.utils.text_tags import skip_tag, split_held

OPEN = "<TOOLCALL>"
CLOSE = "</TOOLCALL>"
_SPACE = " \t\r\n"


class _Where(enum.Enum):
    CONTENT = enum.auto()
    #: behind the opening tag
    OPENED = enum.auto()
    #: before a call, or the array's end
    BETWEEN = enum.auto()
    CALL = enum.auto()
    BEHIND = enum.auto()


class NemotronJsonToolParser(ToolParser):
    """`<TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>`.

    A forgotten bracket or closing tag loses no call whose arguments are there.
    """

    tags = (OPEN, CLOSE)

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._where = _Where.CONTENT
        self._pending = ""
        #: what was read since the opening tag and is content again if no call follows
        self._opening = ""
        self._call = CallReader(self.reply, "arguments")
        self._steps = {
            _Where.CONTENT: self._read_content,
            _Where.OPENED: self._read_bracket,
            _Where.BETWEEN: self._read_between,
            _Where.CALL: self._read_call,
            _Where.BEHIND: self._read_behind,
        }

    def _consume(self, text: str) -> None:
        self._pending += text
        while self._pending and self._steps[self._where]():
            pass

    def _read_content(self) -> bool:
        """Up to the next opening tag; False when more text is needed to go on (as below)."""
        content, tag, rest = self._pending.partition(OPEN)
        if not tag:
            content, self._pending = split_held(content, (OPEN,))
            self.reply.say(content)
            return False
        self.reply.say(content)
        self._pending, self._opening = rest, OPEN
        self._where = _Where.OPENED
        return True

    def _read_bracket(self) -> bool:
        rest = self._pending.lstrip(_SPACE)
        if not rest:
            return False
        if rest[0] != "[":
            return self._refuse()
        self._take(rest[1:])
        self._where = _Where.BETWEEN
        return True

    def _read_between(self) -> bool:
        rest = self._pending.lstrip(_SPACE if self._opening else _SPACE + ",")
        if not rest:
            return False
        if rest[0] == "{":
            self._take(rest)
            self.reply.open_call(self._opening)
            self._call = CallReader(self.reply, "arguments")
            self._where = _Where.CALL
        elif rest[0] == "]" and not self._opening:
            self._pending = rest[1:]
            self._where = _Where.BEHIND
        elif not self._opening and (CLOSE.startswith(rest) or rest.startswith(CLOSE)):
            self._pending = rest
            self._where = _Where.BEHIND
        else:
            return self._refuse()
        return True

    def _take(self, rest: str) -> None:
        """Go on with `rest`, and keep what was read until there has been a call."""
        if self._opening:
            self._opening += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest

    def _refuse(self, read: str = "") -> bool:
        """No call follows: what was read since the tag is content, and so is the rest."""
        self.reply.say(self._opening + read)
        self._where = _Where.CONTENT
        return True

    def _read_call(self) -> bool:
        size = self._call.feed(self._pending)
        self._pending = self._pending[size:]
        if self._call.state is CallState.OPEN:
            return False
        if self._call.state is CallState.REFUSED:
            return self._refuse(self._call.raw)
        self._opening = ""
        self._where = _Where.BETWEEN
        return True

    def _read_behind(self) -> bool:
        rest = skip_tag(self._pending, CLOSE)
        if rest is None:
            return False
        self._pending = rest
        self._where = _Where.CONTENT
        return True

    def _flush(self) -> None:
        if self._where is _Where.CALL and not self._call.started:
            self._refuse(self._call.raw)
        elif self._opening and self._where in (_Where.OPENED, _Where.BETWEEN):
            self._refuse()
        if self._where is _Where.CONTENT:
            self.reply.say(self._pending)
