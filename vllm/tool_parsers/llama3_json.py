# SPDX-License-Identifier: Apache-2.0
"""Calls as bare JSON: Llama 3.1, 3.2 and 3.3."""

from vllm.tool_parsers.base import ToolSchemas
from vllm.tool_parsers.stepwise import JsonCallParser

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;"


class Llama3JsonToolParser(JsonCallParser):
    """`{"name": "f", "parameters": {...}}` at the reply's beginning or behind `<|python_tag|>`;
    more of them follow with or without `;`.

    No tag need separate calls from text, so the name must be that of a tool, where tools are given.
    """

    tags = (PYTHON_TAG,)
    openings = (PYTHON_TAG,)
    arguments_key = "parameters"

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._names = tools or None
        self._read = self._read_before_call

    def _opened(self, tag: str) -> None:
        self._opening = tag
        self._read = self._read_before_call

    def _read_before_call(self) -> bool:
        """At the reply's beginning or behind a tag."""
        rest = self._pending.lstrip()
        if not rest:
            return False
        if rest[0] != "{":
            return self._refuse()
        self._begin_at(rest)
        return True

    def _read_behind_call(self) -> bool:
        rest = self._pending.lstrip(_BETWEEN)
        if not rest or (PYTHON_TAG.startswith(rest) and rest != PYTHON_TAG):
            return False
        if rest.startswith(PYTHON_TAG):
            self._pending = rest
        if rest[0] == "{":
            self._begin_at(rest)
        else:
            self._read = self._read_content
        return True

    def _begin_at(self, rest: str) -> None:
        """A call begins with `rest`; the text before it is content again if it turns out none."""
        self._opening += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        self._begin_call()

    def _flush(self) -> None:
        if self._read == self._read_before_call:
            self._refuse()
        elif self._read == self._read_behind_call and self._pending.strip(_BETWEEN):
            self._read = self._read_content
        super()._flush()
