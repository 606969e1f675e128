# SPDX-License-Identifier: Apache-2.0
"""Calls in a section of their own, behind the content: Kimi-K2."""

import re

from vllm.tool_parsers.stepwise import StepwiseParser
from vllm.utils.text_tags import find_first, split_held

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
#: `functions.NAME:NUMBER`, the id that templates show the call and its result under
_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+?)(?P<number>:\d+)?")


class KimiK2ToolParser(StepwiseParser):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, any
    number of them between the section's tags. What has no id stays content; one without number is
    a name alone."""

    tags = (_SECTION, _SECTION_END, _CALL, _CALL_END, _ARGUMENTS)
    openings = (_SECTION,)

    def _opened(self, tag: str) -> None:
        self._read = self._read_section

    def _flush(self) -> None:
        rest, self._pending = self._pending, ""
        if self._read == self._read_arguments:
            self.reply.add_arguments(rest)
        elif self._read == self._read_id:
            self.reply.say(_CALL + rest)
        elif self._read == self._read_content:
            self.reply.say(rest)

    def _unread(self) -> str:
        return self._pending if self._read == self._read_arguments else ""

    def _read_section(self) -> bool:
        """Up to the next call or the section's end; there is nothing but layout between."""
        found = find_first(self._pending, (_CALL, _SECTION_END))
        if found is None:
            _, self._pending = split_held(self._pending, (_CALL, _SECTION_END))
            return False
        at, tag = found
        self._pending = self._pending[at + len(tag) :]
        self._read = self._read_id if tag == _CALL else self._read_content
        return True

    def _read_id(self) -> bool:
        found = find_first(self._pending, (_ARGUMENTS, _CALL_END))
        if found is None:
            return False
        at, tag = found
        written = self._pending[: at + len(tag)]
        called = _ID.fullmatch(self._pending[:at].strip())
        self._pending = self._pending[at + len(tag) :]
        if called is None or tag == _CALL_END:
            self.reply.say(_CALL + written)
            self._read = self._read_section
            return True
        self.reply.open_call(_CALL + written)
        self.reply.start_call(called["name"], called[0] if called["number"] else None)
        self._read = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        arguments, tag, rest = self._pending.partition(_CALL_END)
        if not tag:
            arguments, self._pending = split_held(arguments, (_CALL_END,))
        self.reply.wrote(arguments)
        self.reply.add_arguments(arguments)
        if not tag:
            return False
        self.reply.end_call()
        self._pending = rest
        self._read = self._read_section
        return True
