# SPDX-License-Identifier: Apache-2.0
"""What parsers of calls between tags share: the loop over a reply, and calls that are JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from vllm.tool_parsers.base import ToolParser, ToolSchemas
from vllm.tool_parsers.json_call import CallReader, CallState
from vllm.utils.text_tags import find_first, skip_tag, split_held


class StepwiseParser(ToolParser):
    """Keeps in `_pending` what is unread, and in `_read` the method that reads on from there.

    Such a method reports to `reply` and names the next one; it returns False when more text is
    needed to go on. Outside of calls all text is content, up to one of the
    tags `openings`.
    """

    openings: ClassVar[tuple[str, ...]]

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._pending = ""
        self._read: Callable[[], bool] = self._read_content

    @abstractmethod
    def _opened(self, tag: str) -> None:
        """Name the method that reads on behind an opening tag."""

    def _consume(self, text: str) -> None:
        if not self._pending and "<" not in text and self._read == self._read_content:
            self.reply.say(text)
            return
        self._pending += text
        while self._pending and self._step():
            pass

    def _step(self) -> bool:
        return self._read()

    def _read_content(self) -> bool:
        """Up to an opening tag."""
        found = find_first(self._pending, self.openings)
        if found is None:
            content, self._pending = split_held(self._pending, self.openings)
            self.reply.say(content)
            return False
        at, tag = found
        self.reply.say(self._pending[:at])
        self._pending = self._pending[at + len(tag) :]
        self._opened(tag)
        return True

    def _close(self, tag: str) -> bool:
        """Past the closing tag, if there is one, and on with content."""
        rest = skip_tag(self._pending, tag)
        if rest is None:
            return False
        self._pending = rest
        self._read = self._read_content
        return True


class JsonCallParser(StepwiseParser):
    """Calls are JSON objects, whose arguments have the key `arguments_key`: see `CallReader`."""

    arguments_key: ClassVar[str] = "arguments"

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        #: what was read before the first call, content again if none follows
        self._opening = ""
        self._call = CallReader(self.reply, self.arguments_key)

    @abstractmethod
    def _read_behind_call(self) -> bool:
        """Read on behind a call."""

    def _begin_call(self) -> None:
        self.reply.open_call(self._opening)
        self._call = CallReader(self.reply, self.arguments_key)
        self._read = self._read_call

    def _read_call(self) -> bool:
        size = self._call.feed(self._pending)
        self._pending = self._pending[size:]
        if self._call.state is CallState.OPEN:
            return False
        if self._call.state is CallState.REFUSED:
            return self._refuse(self._call.raw)
        self._opening = ""
        self._read = self._read_behind_call
        return True

    def _refuse(self, read: str = "") -> bool:
        """No call follows: what was read is content, and so is the rest."""
        self.reply.say(self._opening + read)
        self._read = self._read_content
        return True

    def _flush(self) -> None:
        if self._read == self._read_call and not self._call.started:
            self._refuse(self._call.raw)
        if self._read == self._read_content:
            self.reply.say(self._pending)
