# SPDX-License-Identifier: Apache-2.0
"""The reply is the arguments: what naming a tool in `tool_choice` makes every model write."""

from __future__ import annotations

from vllm.tool_parsers.base import ToolParser, ToolSchemas


class NamedCallParser(ToolParser):
    """One call of the tool `name` with the whole reply as its arguments.

    A reply that does not begin as an object, cut off before its arguments for instance, is content.
    """

    def __init__(self, tools: ToolSchemas, name: str) -> None:
        super().__init__(tools)
        self._name = name
        self._begun = False

    def _consume(self, text: str) -> None:
        if not self._begun:
            if not text.strip():
                self.reply.say(text)
                return
            self._begun = True
            if text.lstrip().startswith("{"):
                self.reply.open_call("")
                self.reply.start_call(self._name)
                text = text.lstrip()
        if self.reply.num_calls:
            self.reply.wrote(text)
            self.reply.add_arguments(text)
        else:
            self.reply.say(text)

    def _flush(self) -> None:
        """Nothing is kept back."""
