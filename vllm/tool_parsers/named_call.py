# SPDX-License-Identifier: Apache-2.0
"""The reply is the arguments: what naming a tool in `tool_choice` makes every model write."""

from __future__ import annotations

from vllm.tool_parsers.base import ToolParser, ToolSchemas


class NamedCallParser(ToolParser):
    """One call of the tool `name` with the whole reply as its arguments."""

    def __init__(self, tools: ToolSchemas, name: str) -> None:
        super().__init__(tools)
        self._name = name

    def _consume(self, text: str) -> None:
        if not text:
            return
        if not self.reply.num_calls:
            self.reply.start_call(self._name)
        self.reply.add_arguments(text)

    def _flush(self) -> None:
        """Nothing is kept back."""
