# SPDX-License-Identifier: Apache-2.0
"""What parsers of calls between `<tool_call>` tags share: the loop, and the end of a call."""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from vllm.tool_parsers.base import ToolParser, ToolSchemas
from vllm.utils.text_tags import skip_tag

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class TaggedCallParser(ToolParser):
    """Is always somewhere in the reply (`_where`), and reads on from there in `_pending`.

    `_content`: where a reply begins, and where it goes on behind a call.
    """

    tags = (OPEN, CLOSE)
    _content: ClassVar[enum.Enum]

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._where = self._content
        self._pending = ""

    @abstractmethod
    def _steps(self) -> Mapping[enum.Enum, Callable[[], bool]]:
        """What reads on from each place; it returns False when more text is needed to go on."""

    def _consume(self, text: str) -> None:
        if self._where is self._content and not self._pending and "<" not in text:
            self.reply.say(text)
            return
        self._pending += text
        while self._pending and self._step():
            pass

    def _step(self) -> bool:
        """Read on from the present place."""
        return self._steps()[self._where]()

    def _read_behind(self) -> bool:
        """Past the closing tag, if there is one."""
        rest = skip_tag(self._pending, CLOSE)
        if rest is None:
            return False
        self._pending = rest
        self._where = self._content
        return True
