# SPDX-License-Identifier: Apache-2.0
"""Calls as JSON between `<tool_call>` tags: Hermes, Qwen2.5, Qwen3."""

from vllm.tool_parsers.stepwise import JsonCallParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesToolParser(JsonCallParser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them.

    A forgotten closing tag or brace does not lose a call whose arguments are there.
    """

    tags = (OPEN, CLOSE)
    openings = (OPEN,)

    def _opened(self, tag: str) -> None:
        self._opening = tag
        self._begin_call()

    def _read_behind_call(self) -> bool:
        return self._close(CLOSE)
