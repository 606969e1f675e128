# SPDX-License-Identifier: Apache-2.0
"""Calls as a JSON array between `<TOOLCALL>` tags: Nemotron Nano v2."""

from vllm.tool_parsers.json_list import JsonArrayParser

OPEN = "<TOOLCALL>"
CLOSE = "</TOOLCALL>"


class NemotronJsonToolParser(JsonArrayParser):
    """`<TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>`.

    A forgotten bracket or closing tag loses no call whose arguments are there.
    """

    tags = (OPEN, CLOSE)
    openings = (OPEN,)

    def _opened(self, tag: str) -> None:
        self._opening = tag
        self._read = self._read_bracket

    def _ends_without_bracket(self, rest: str) -> bool:
        return CLOSE.startswith(rest) or rest.startswith(CLOSE)

    def _read_behind_array(self) -> bool:
        return self._close(CLOSE)
