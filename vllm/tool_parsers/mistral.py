# SPDX-License-Identifier: Apache-2.0
"""Calls behind `[TOOL_CALLS]`, as a JSON array or one by one: Mistral, Mixtral."""

import re
import uuid

from vllm.tool_parsers.base import ToolSchemas
from vllm.tool_parsers.json_list import JsonArrayParser
from vllm.tool_parsers.json_object import ObjectScanner, ScanState
from vllm.utils.text_tags import num_held

_CALLS, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEADER = re.compile(
    rf"\s*(?P<name>[\w.-]+)\s*({re.escape(_CALL_ID)}\s*(?P<id>[\w.-]+)\s*)?", re.ASCII
)
#: longer headers are text
_MAX_HEADER = 256
_ID_LENGTH = 9


class MistralToolParser(JsonArrayParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, as older tokenizers write it, or
    `[TOOL_CALLS]f[ARGS]{...}` for each call, with `[CALL_ID]id` before the arguments or without.

    An id that the model does not write has the nine letters and digits that the templates demand.
    """

    tags = (_CALLS, _CALL_ID, _ARGUMENTS)
    openings = (_CALLS,)

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._arguments = ObjectScanner()

    @staticmethod
    def new_call_id() -> str:
        return uuid.uuid4().hex[:_ID_LENGTH]

    def _opened(self, tag: str) -> None:
        self._opening = tag
        self._read = self._read_form

    def _read_form(self) -> bool:
        """Which of the forms follows."""
        begin = self._pending.lstrip()
        if not begin:
            return False
        self._read = self._read_bracket if begin[0] == "[" else self._read_header
        return True

    def _read_header(self) -> bool:
        """Name and id of a call, up to its arguments."""
        header, tag, rest = self._pending.partition(_ARGUMENTS)
        if not tag:
            too_long = len(header) >= _MAX_HEADER + len(_ARGUMENTS)
            return self._refuse() if too_long else False
        called = _HEADER.fullmatch(header) if len(header) <= _MAX_HEADER else None
        begin = rest.lstrip()
        if called is None or begin[:1] not in ("", "{"):
            return self._refuse()
        if not begin:
            return False
        self.reply.open_call(self._opening + self._pending[: -len(begin)])
        self.reply.start_call(called["name"], called["id"])
        self._opening, self._pending = "", begin
        self._arguments = ObjectScanner()
        self._read = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        _, size = self._arguments.feed(self._pending)
        self._add(size)
        if self._arguments.state is ScanState.OPEN:
            return False
        if self._arguments.state is ScanState.CLOSED:
            self.reply.end_call()
            self._read = self._read_content
        else:
            self._read = self._read_broken
        return True

    def _read_broken(self) -> bool:
        """Arguments that are no object: up to the next call nothing shows where they end."""
        found = self._pending.find(_CALLS)
        if found >= 0:
            self._add(found)
            self._read = self._read_content
            return True
        self._add(len(self._pending) - num_held(self._pending, self.openings))
        return False

    def _add(self, size: int) -> None:
        """So many characters more are arguments."""
        self.reply.wrote(self._pending[:size])
        self.reply.add_arguments(self._pending[:size])
        self._pending = self._pending[size:]

    def _unread(self) -> str:
        return self._pending if self._read == self._read_broken else ""

    def _flush(self) -> None:
        if self._read in (self._read_form, self._read_header):
            self._refuse()
        elif self._read == self._read_broken:
            self.reply.add_arguments(self._pending)
        super()._flush()
