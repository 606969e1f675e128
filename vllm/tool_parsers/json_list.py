# SPDX-License-Identifier: Apache-2.0
"""Calls as a JSON array: what `tool_choice: "required"` makes every model write."""

from vllm.tool_parsers.base import ToolSchemas
from vllm.tool_parsers.stepwise import JsonCallParser

_SPACE = " \t\r\n"


class JsonArrayParser(JsonCallParser):
    """Reads `[{"name": "f", ...}, ...]` from `_read_bracket` on; what is no such array is content.

    A subclass says what may stand behind the calls besides the closing bracket.
    """

    def _read_bracket(self) -> bool:
        rest = self._pending.lstrip(_SPACE)
        if not rest:
            return False
        if rest[0] != "[":
            return self._refuse()
        self._take(rest[1:])
        self._read = self._read_behind_call
        return True

    def _read_behind_call(self) -> bool:
        """Before a call, or the array's end."""
        rest = self._pending.lstrip(_SPACE if self._opening else _SPACE + ",")
        if not rest:
            return False
        if rest[0] == "{":
            self._take(rest)
            self._begin_call()
        elif rest[0] == "]" and not self._opening:
            self._pending = rest[1:]
            self._read = self._read_behind_array
        elif not self._opening and self._ends_without_bracket(rest):
            self._pending = rest
            self._read = self._read_behind_array
        else:
            return self._refuse()
        return True

    def _read_behind_array(self) -> bool:
        return self._read_content()

    def _ends_without_bracket(self, rest: str) -> bool:
        """Whether `rest`, behind a call, may follow an array whose bracket is missing."""
        return False

    def _take(self, rest: str) -> None:
        """Go on with `rest`, and keep what was read until there has been a call."""
        if self._opening or self._read == self._read_bracket:
            self._opening += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest

    def _flush(self) -> None:
        begun = self._read == self._read_behind_call and self._opening
        if begun or self._read == self._read_bracket:
            self._refuse()
        super()._flush()


class JsonListParser(JsonArrayParser):
    """`[{"name": "f", "parameters": {...}}, ...]` from the reply's beginning."""

    arguments_key = "parameters"
    openings = ()

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._read = self._read_bracket

    def _opened(self, tag: str) -> None:
        """There is no tag."""

    def _read_content(self) -> bool:
        self.reply.say(self._pending)
        self._pending = ""
        return False
