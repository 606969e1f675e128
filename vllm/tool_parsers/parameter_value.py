# SPDX-License-Identifier: Apache-2.0
"""A parameter written as plain text, as the JSON that its schema asks for."""

from __future__ import annotations

from vllm.tool_parsers.json_text import encode_piece, encode_string, parse_json
from vllm.tool_parsers.schema_types import json_type


class ParameterValue:
    """Text to JSON, piece by piece for strings and at the end for anything else.

    One line break at each end belongs to the layout. If the schema allows only strings, the text
    is one. Otherwise text that is JSON of an allowed type goes out as written (`True`, `None` and
    the like in lower case, as JSON spells them), and anything else as a string.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._streams = types <= {"string"}
        self._begun = False
        self._trailing = ""
        self._text = ""

    def feed(self, text: str) -> str:
        """The JSON that became certain with `text`."""
        text = self._trailing + text
        if not text:
            return ""
        opening = ""
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
            opening = '"' if self._streams else ""
        self._trailing = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._streams:
            return opening + encode_piece(text)
        self._text += text
        return ""

    def finish(self) -> str:
        """The rest, when the value is complete."""
        if self._streams:
            return '"' if self._begun else '""'
        written = self._text.strip()
        if written.lower() in ("true", "false", "null", "none"):
            written = "null" if written.lower() == "none" else written.lower()
        try:
            kind = json_type(parse_json(written))
        except ValueError:
            kind = "string"
        if kind != "string" and kind in self._types:
            return written
        return encode_string(self._text)
