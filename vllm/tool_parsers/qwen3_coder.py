# SPDX-License-Identifier: Apache-2.0
"""Calls as nested tags with plain-text values: Qwen3-Coder, Qwen3.5."""

from __future__ import annotations

from vllm.tool_parsers.base import ToolSchemas
from vllm.tool_parsers.json_text import encode_string
from vllm.tool_parsers.parameter_value import ParameterValue
from vllm.tool_parsers.schema_types import parameter_types
from vllm.tool_parsers.stepwise import StepwiseParser
from vllm.utils.text_tags import find_first, skip_tag, split_held

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"

#: longer "names" are text that only looks like a tag
_MAX_NAME = 256


class Qwen3CoderToolParser(StepwiseParser):
    r"""`<tool_call>\n<function=f>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>`.

    The tool's schema says how a value becomes JSON: see `ParameterValue`. The outer tags and
    closing tags may be missing, as models forget them.
    """

    tags = (OPEN, CLOSE)
    openings = (OPEN, _FUNCTION)

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        #: opening tags so far, content again if no call follows
        self._raw = ""
        self._function = ""
        self._num_parameters = 0
        self._value = ParameterValue(frozenset())

    def _opened(self, tag: str) -> None:
        self._raw = tag
        self.reply.open_call(tag)
        self._read = self._read_opened if tag == OPEN else self._read_function_name

    def _read_opened(self) -> bool:
        """Between the two opening tags."""
        rest = skip_tag(self._pending, _FUNCTION)
        if rest is None:
            return False
        if rest == self._pending:
            return self._refuse()
        self._raw += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        self._read = self._read_function_name
        return True

    def _refuse(self) -> bool:
        """No call after all."""
        self.reply.say(self._raw)
        self._read = self._read_content
        return True

    def _read_function_name(self) -> bool:
        name, end, rest = self._pending.partition(">")
        if len(name) > _MAX_NAME or "<" in name or "\n" in name or (end and not name.strip()):
            return self._refuse()
        if not end:
            return False
        self._function = name.strip()
        self.reply.start_call(self._function)
        self.reply.add_arguments("{")
        self._num_parameters = 0
        self._pending = rest
        self._read = self._read_function
        return True

    def _read_function(self) -> bool:
        """Between parameters, where only tags count."""
        ends = (_PARAMETER, _END_FUNCTION, CLOSE)
        found = find_first(self._pending, ends)
        if found is None:
            _, self._pending = split_held(self._pending, ends)
            return False
        at, tag = found
        if tag == _PARAMETER:
            self._read = self._read_parameter_name
            self._pending = self._pending[at + len(tag) :]
        else:
            self.reply.add_arguments("}")
            self.reply.end_call()
            self._read = self._read_behind_function
            self._pending = self._pending[at:].removeprefix(_END_FUNCTION)
        return True

    def _read_parameter_name(self) -> bool:
        name, end, rest = self._pending.partition(">")
        if not end:
            return False
        name = name.strip()
        comma = ", " if self._num_parameters else ""
        self.reply.add_arguments(f"{comma}{encode_string(name)}: ")
        self._num_parameters += 1
        self._value = ParameterValue(parameter_types(self.tools.get(self._function, {}), name))
        self._pending = rest
        self._read = self._read_value
        return True

    def _read_value(self) -> bool:
        ends = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)
        found = find_first(self._pending, ends)
        if found is None:
            text, self._pending = split_held(self._pending, ends)
            self.reply.add_arguments(self._value.feed(text))
            return False
        at, _ = found
        self.reply.add_arguments(self._value.feed(self._pending[:at]) + self._value.finish())
        self._pending = self._pending[at:].removeprefix(_END_PARAMETER)
        self._read = self._read_function
        return True

    def _read_behind_function(self) -> bool:
        return self._close(CLOSE)

    def _step(self) -> bool:
        outside, before = self._read == self._read_content, self._pending
        goes_on = super()._step()
        if not outside:
            self.reply.wrote(before[: len(before) - len(self._pending)])
        return goes_on

    def _unread(self) -> str:
        return self._pending

    def _flush(self) -> None:
        if self._read == self._read_content:
            self.reply.say(self._pending)
        elif self._read in (self._read_opened, self._read_function_name):
            self.reply.say(self._raw + self._pending)
        elif self._read == self._read_value:
            self.reply.add_arguments(self._value.feed(self._pending))
