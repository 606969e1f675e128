# SPDX-License-Identifier: Apache-2.0
"""One tool call written as a JSON object with a name and arguments."""

import enum

from vllm.tool_parsers.base import ReplyBuilder
from vllm.tool_parsers.json_object import MemberPiece, ObjectScanner, ScanState
from vllm.tool_parsers.json_text import decode_string


class CallState(enum.Enum):
    """Whether a call goes on, has ended, or turned out to be none."""

    OPEN = enum.auto()
    ENDED = enum.auto()
    REFUSED = enum.auto()


class CallReader:
    """Reads `{"name": ..., <arguments_key>: {...}}` and reports the call to `reply`.

    The members may come in either order. Arguments go out exactly as written; missing or null ones
    are `{}`; a string holding JSON text goes out unquoted. The call begins with its arguments:
    what is refused before that is in `raw`, for the caller to treat as content.
    """

    def __init__(self, reply: ReplyBuilder, arguments_key: str) -> None:
        self.state = CallState.OPEN
        self.started = False
        self.raw = ""
        self._reply = reply
        self._arguments_key = arguments_key
        self._scanner = ObjectScanner()
        self._name_text = ""
        self._name: str | None = None
        self._held = ""
        self._complete = False
        self._streaming = False

    def feed(self, text: str) -> int:
        """Read more; returns how many characters of `text` belong to the call."""
        pieces, size = self._scanner.feed(text)
        self.raw = "" if self.started else self.raw + text[:size]
        self._reply.wrote(text[:size])
        for piece in pieces:
            if self.state is CallState.OPEN:
                self._read(piece)
        if self.state is CallState.OPEN and self._scanner.state is not ScanState.OPEN:
            self._end(self._scanner.state is ScanState.CLOSED)
        return size

    def _read(self, piece: MemberPiece) -> None:
        if piece.key == "name" and self._name is None:
            self._name_text += piece.text
            if piece.last:
                self._name = decode_string(self._name_text)
                self._check(bool(self._name))
        elif piece.key == self._arguments_key and not self._complete:
            self._held += piece.text
            self._complete = piece.last
        if self._name is None or self.state is not CallState.OPEN:
            return
        self._streaming = self._streaming or self._held.startswith("{")
        if self._streaming:
            self._send(self._held)
            self._held = ""
        elif self._complete:
            self._check(self._plain_arguments() is not None)

    def _send(self, arguments: str) -> None:
        if not self.started:
            self.started = True
            assert self._name is not None
            self._reply.start_call(self._name)
        self._reply.add_arguments(arguments)

    def _plain_arguments(self) -> str | None:
        """Complete arguments that are not written as an object."""
        return "{}" if self._held in ("", "null") else decode_string(self._held)

    def _end(self, complete: bool) -> None:
        if not self.started:
            arguments = self._plain_arguments()
            self._check(complete and self._name is not None and arguments is not None)
            if self.state is CallState.OPEN and arguments is not None:
                self._send(arguments)
        if self.state is CallState.OPEN:
            self.state = CallState.ENDED
            if complete:
                self._reply.end_call()

    def _check(self, good: bool) -> None:
        if not good:
            self.state = CallState.REFUSED
