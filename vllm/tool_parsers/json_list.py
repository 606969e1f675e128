# SPDX-License-Identifier: Apache-2.0
"""Calls as a JSON array: what `tool_choice: "required"` makes every model write."""

from __future__ import annotations

import enum

from vllm.tool_parsers.base import ToolParser, ToolSchemas
from vllm.tool_parsers.json_call import CallReader, CallState

_SPACE = " \t\r\n"


class _Where(enum.Enum):
    START = enum.auto()
    BETWEEN = enum.auto()
    CALL = enum.auto()
    CONTENT = enum.auto()


class JsonListParser(ToolParser):
    """`[{"name": "f", "parameters": {...}}, ...]`; a reply that is no such array is content."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._where = _Where.START
        self._pending = ""
        #: what came before the first call, content again if there is none
        self._opening = ""
        self._call = CallReader(self.reply, "parameters")

    def _consume(self, text: str) -> None:
        self._pending += text
        while self._pending and self._step():
            pass

    def _step(self) -> bool:
        """False when more text is needed to go on."""
        if self._where is _Where.CONTENT:
            self.reply.say(self._pending)
            self._pending = ""
            return False
        if self._where is _Where.CALL:
            return self._read_call()
        rest = self._pending.lstrip(_SPACE + ("," if self._where is _Where.BETWEEN else ""))
        if not rest:
            return False
        if self._where is _Where.START and rest[0] == "[":
            self._opening = self._pending[: -len(rest)] + "["
            self._pending = rest[1:]
            self._where = _Where.BETWEEN
        elif self._where is _Where.BETWEEN and rest[0] == "{":
            self._pending = rest if self.reply.num_calls else self._pending
            self._call = CallReader(self.reply, "parameters")
            self.reply.open_call("" if self.reply.num_calls else self._opening)
            self._where = _Where.CALL
        elif self._where is _Where.BETWEEN and rest[0] == "]" and self.reply.num_calls:
            self._pending = rest[1:]
            self._where = _Where.CONTENT
        else:
            self._refuse("")
        return True

    def _refuse(self, read: str) -> None:
        """What follows is no call, so it is content, with `read` before it."""
        opening = "" if self.reply.num_calls else self._opening
        self._pending = opening + read + self._pending
        self._where = _Where.CONTENT

    def _read_call(self) -> bool:
        size = self._call.feed(self._pending)
        self._pending = self._pending[size:]
        if self._call.state is CallState.OPEN:
            return False
        if self._call.state is CallState.REFUSED:
            self._refuse(self._call.raw)
        else:
            self._where = _Where.BETWEEN
        return True

    def _flush(self) -> None:
        refused = self._where is _Where.CALL and not self._call.started
        if refused or (self._where is not _Where.CONTENT and not self.reply.num_calls):
            self._refuse(self._call.raw if refused else "")
            self.reply.say(self._pending)
