# SPDX-License-Identifier: Apache-2.0
"""What parsers of calls between tags share: the loop over a reply, and calls that are JSON."""

import enum
from abc import abstractmethod
from collections.abc import Callable, Container
from typing import ClassVar

from vllm.tool_parsers.base import ReplyBuilder, ToolParser, ToolSchemas, decode_string
from vllm.tool_parsers.json_object import MemberPiece, ObjectScanner, ScanState
from vllm.utils.text_tags import find_first, skip_tag, split_held


class CallState(enum.Enum):
    """Whether a call goes on, has ended, or turned out to be none."""

    OPEN = enum.auto()
    ENDED = enum.auto()
    REFUSED = enum.auto()


class CallReader:
    """Reads `{"name": ..., <arguments_key>: {...}}` and reports the call to `reply`.

    The members may come in either order. Arguments go out exactly as written; missing or null ones
    are `{}`; a string holding JSON text goes out unquoted. The call begins with its arguments:
    what is refused before that is in `raw`, for the caller to treat as content. `names`: of the
    tools that may be called, None for any.
    """

    def __init__(
        self, reply: ReplyBuilder, arguments_key: str, names: Container[str] | None = None
    ) -> None:
        self.state = CallState.OPEN
        self.started = False
        self.raw = ""
        self._reply = reply
        self._arguments_key = arguments_key
        self._names = names
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
                self._check(self._is_name(self._name))
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

    def _is_name(self, name: str | None) -> bool:
        return bool(name) and (self._names is None or name in self._names)

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
        self._first_characters = {tag[0] for tag in self.openings}

    @abstractmethod
    def _opened(self, tag: str) -> None:
        """Name the method that reads on behind an opening tag."""

    def _consume(self, text: str) -> None:
        if not self._pending and self._read == self._read_content:
            if not any(char in text for char in self._first_characters):
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
        #: of the tools that may be called, None for any
        self._names: Container[str] | None = None
        self._call = CallReader(self.reply, self.arguments_key)

    @abstractmethod
    def _read_behind_call(self) -> bool:
        """Read on behind a call."""

    def _begin_call(self) -> None:
        self.reply.open_call(self._opening)
        self._call = CallReader(self.reply, self.arguments_key, self._names)
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
