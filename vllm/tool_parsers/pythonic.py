# SPDX-License-Identifier: Apache-2.0
"""Calls as a list of Python calls: Llama 3.2, and models trained like it."""

import re
from abc import abstractmethod

from vllm.tool_parsers.base import ToolSchemas
from vllm.tool_parsers.python_call import PythonCallReader
from vllm.tool_parsers.stepwise import CallState, StepwiseParser

#: the beginning of a list of calls, or what may become one at the end of the text
_LIST = re.compile(r"\[\s*([A-Za-z_][\w.-]{0,255})?(\(|\Z)", re.ASCII)


class PythonCallParser(StepwiseParser):
    """What parsers of Python calls share.

    A call goes out whole, when what stands behind it shows that it belongs to the format. Until
    then all text since the last call is in `_held`, and content if no call follows.
    """

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._held = ""
        self._call = PythonCallReader()

    def _opened(self, tag: str) -> None:
        self._held = tag
        self._begin_call()

    @abstractmethod
    def _begin_call(self) -> None:
        """Make the reader of the next call, and name `_read_before_call`."""

    @abstractmethod
    def _read_behind_call(self) -> bool:
        """Read on behind a call that is not reported yet."""

    def _take(self, size: int) -> None:
        """Read so many characters."""
        self._held += self._pending[:size]
        self._pending = self._pending[size:]

    def _take_space(self) -> bool:
        """Read the space that comes first; returns whether anything follows it."""
        self._take(len(self._pending) - len(self._pending.lstrip()))
        return bool(self._pending)

    def _read_before_call(self) -> bool:
        if not self._take_space():
            return False
        self._read = self._read_call
        return True

    def _read_call(self) -> bool:
        self._take(self._call.feed(self._pending))
        if self._call.state is CallState.REFUSED:
            return self._refuse()
        if self._call.state is CallState.OPEN:
            return False
        self._read = self._read_behind_call
        return True

    def _report(self) -> None:
        self.reply.start_call(self._call.name)
        self.reply.add_arguments(self._call.arguments)
        self.reply.end_call()
        self._held = ""

    def _refuse(self) -> bool:
        """No call follows: what was read is content, and so is the rest."""
        self.reply.say(self._held)
        self._read = self._read_content
        return True

    def _flush(self) -> None:
        if self._read == self._read_behind_call:
            self._report()
            return
        if self._read != self._read_content:
            self._refuse()
        self.reply.say(self._pending)


class PythonicToolParser(PythonCallParser):
    """`[f(a=1), g(b="x")]`, anywhere in the reply.

    No tag separates calls from text, so the name must be that of a tool, where tools are given. A
    forgotten bracket loses no call.
    """

    openings = ("[",)

    def _read_content(self) -> bool:
        """As the base does; most brackets of a text, code above all, begin no list of calls."""
        found = _LIST.search(self._pending)
        begin = found.start() if found else len(self._pending)
        self.reply.say(self._pending[:begin])
        self._pending = self._pending[begin:]
        if found is None or not found[2]:
            return False
        self._pending = self._pending[1:]
        self._opened("[")
        return True

    def _begin_call(self) -> None:
        self._call = PythonCallReader(self.tools or None)
        self._read = self._read_before_call

    def _read_behind_call(self) -> bool:
        if not self._take_space():
            return False
        if self._pending[0] not in ",]":
            return self._refuse()
        goes_on = self._pending[0] == ","
        self._report()
        self._pending = self._pending[1:]
        if goes_on:
            self._held = ","
            self._begin_call()
        else:
            self._read = self._read_content
        return True
