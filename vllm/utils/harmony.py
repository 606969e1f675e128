# SPDX-License-Identifier: Apache-2.0
"""Messages of the harmony format (gpt-oss), while their text is still arriving.

A reply is a row of messages `<|start|>assistant to=RECIPIENT<|channel|>CHANNEL <|constrain|>json
<|message|>TEXT<|end|>`; recipient and constraint may be missing, the recipient may stand behind the
channel, `<|return|>` or `<|call|>` may stand for `<|end|>`; the first `<|start|>` is the prompt's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from vllm.utils.text_tags import find_first, split_held

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
#: what the text of a message stops at; a new message may begin without an end of the last
_STOPS = (*ENDS, START)
#: what a header begins with where the prompt has its role
_HEADS = (CHANNEL, START, " to=")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*([^\s<]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class MessagePiece:
    """The next part of a message. `header` is written in its first piece, `end` in its last, both
    exactly as the model did; text outside of messages has channel "final"."""

    channel: str
    recipient: str | None
    text: str
    header: str = ""
    end: str = ""


class HarmonyReader:
    """Splits a reply into pieces of messages, however it is cut."""

    def __init__(self) -> None:
        #: text that is not decided yet
        self.pending = ""
        #: reads on from the present place; False when more text is needed
        self._read: Callable[[list[MessagePiece]], bool] = self._read_start
        self._channel = "final"
        self._recipient: str | None = None

    def feed(self, text: str) -> list[MessagePiece]:
        """What is certain after `text`."""
        self.pending += text
        found: list[MessagePiece] = []
        while self.pending and self._read(found):
            pass
        return found

    def finish(self) -> list[MessagePiece]:
        """The rest; of a header that was cut there is nothing, but for text that has no tag."""
        rest, self.pending = self.pending, ""
        is_header = self._read == self._read_header and (START in rest or CHANNEL in rest)
        if not rest or is_header:
            return []
        return [MessagePiece(self._channel, self._recipient, rest)]

    def _read_start(self, found: list[MessagePiece]) -> bool:
        """Where a message begins, or text that belongs to none; False when more is needed."""
        begin = self.pending.removeprefix("\n")
        if any(begin.startswith(head) for head in _HEADS):
            self._read = self._read_header
        elif any(head.startswith(begin) for head in _HEADS):
            return False
        else:
            self._channel, self._recipient = "final", None
            self._read = self._read_text
        return True

    def _read_header(self, found: list[MessagePiece]) -> bool:
        header, tag, rest = self.pending.partition(MESSAGE)
        if not tag:
            return False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else None
        found.append(MessagePiece(self._channel, self._recipient, "", header + tag))
        self.pending = rest
        self._read = self._read_text
        return True

    def _read_text(self, found: list[MessagePiece]) -> bool:
        stop = find_first(self.pending, _STOPS)
        if stop is None:
            text, self.pending = split_held(self.pending, _STOPS)
            if text:
                found.append(MessagePiece(self._channel, self._recipient, text))
            return False
        at, tag = stop
        end = "" if tag == START else tag
        found.append(MessagePiece(self._channel, self._recipient, self.pending[:at], end=end))
        self.pending = self.pending[at + len(end) :]
        self._channel, self._recipient = "final", None
        self._read = self._read_start
        return True
