# SPDX-License-Identifier: Apache-2.0
"""The members of a JSON object, while its text is still arriving."""

import enum
from dataclasses import dataclass

from vllm.tool_parsers.base import decode_string

_SPACE = " \t\r\n"


class ScanState(enum.Enum):
    """Whether an object goes on, is complete, or cannot be one."""

    OPEN = enum.auto()
    CLOSED = enum.auto()
    BROKEN = enum.auto()


@dataclass(frozen=True)
class MemberPiece:
    """The next part of a member's value exactly as written; `last` when the value is complete."""

    key: str
    text: str
    last: bool


class _Step(enum.Enum):
    OBJECT = enum.auto()
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    NEXT = enum.auto()


class ObjectScanner:
    """Follows one object. `<` outside of strings breaks it: it begins the tag behind the object.

    Only what decides where a value ends is checked; the inside of values is passed on as it is.
    """

    def __init__(self) -> None:
        self.state = ScanState.OPEN
        self._step = _Step.OBJECT
        self._key = ""
        self._in_string = False
        self._escaped = False
        self._depth = 0
        self._pieces: list[MemberPiece] = []

    def feed(self, text: str) -> tuple[list[MemberPiece], int]:
        """New pieces of values, and how many characters of `text` belong to the object."""
        self._pieces = []
        at = 0
        while at < len(text) and self.state is ScanState.OPEN:
            if self._step is _Step.IN_KEY:
                at = self._read_key(text, at)
            elif self._step is _Step.IN_VALUE:
                at = self._read_value(text, at)
            elif text[at] in _SPACE:
                at += 1
            else:
                at = self._read_mark(text, at)
        return self._pieces, at

    def _read_mark(self, text: str, at: int) -> int:
        """A character of the object's own structure."""
        char = text[at]
        if self._step is _Step.VALUE and char not in "},]:<":
            self._step = _Step.IN_VALUE
            return at
        after = {
            (_Step.OBJECT, "{"): _Step.KEY,
            (_Step.KEY, '"'): _Step.IN_KEY,
            (_Step.COLON, ":"): _Step.VALUE,
            (_Step.NEXT, ","): _Step.KEY,
        }.get((self._step, char))
        if after is not None:
            self._step = after
            self._key = '"' if after is _Step.IN_KEY else self._key
            return at + 1
        if char == "}" and self._step in (_Step.KEY, _Step.NEXT):
            self.state = ScanState.CLOSED
            return at + 1
        self.state = ScanState.BROKEN
        return at

    def _read_key(self, text: str, begin: int) -> int:
        at, closed = self._read_string(text, begin)
        self._key += text[begin:at]
        if closed:
            key = decode_string(self._key)
            if key is None:
                self.state = ScanState.BROKEN
            else:
                self._key, self._step = key, _Step.COLON
        return at

    def _read_value(self, text: str, begin: int) -> int:
        at, complete = begin, False
        while at < len(text) and not complete and self.state is ScanState.OPEN:
            char = text[at]
            if self._in_string:
                at, closed = self._read_string(text, at)
                self._in_string = not closed
                complete = closed and self._depth == 0
            elif char == "<":
                self.state = ScanState.BROKEN
            elif self._depth == 0 and (char in _SPACE or char in ",}"):
                complete = True  # a number, true, false or null ends before this character
            else:
                at += 1
                self._in_string = char == '"'
                if char in "{[":
                    self._depth += 1
                elif char in "}]":
                    self._depth -= 1
                    complete = self._depth == 0
        if at > begin or complete:
            self._pieces.append(MemberPiece(self._key, text[begin:at], complete))
        if complete:
            self._step = _Step.NEXT
        return at

    def _read_string(self, text: str, at: int) -> tuple[int, bool]:
        """Where the rest of a string ends within `text`, and whether it does."""
        while at < len(text):
            char = text[at]
            at += 1
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                return at, True
        return at, False
