# SPDX-License-Identifier: Apache-2.0
"""Calls as messages to a recipient `functions.NAME` of the harmony format: gpt-oss."""

from vllm.tool_parsers.base import ToolParser, ToolSchemas
from vllm.utils.harmony import TAGS, HarmonyReader, MessagePiece

_FUNCTIONS = "functions."


class HarmonyToolParser(ToolParser):
    """The text of such a message is its arguments, `{}` where it is empty. Messages to others stay
    content with their markup; of messages to the user, in whatever channel, it is left out."""

    tags = TAGS

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._reader = HarmonyReader()
        self._empty = False

    def _consume(self, text: str) -> None:
        for piece in self._reader.feed(text):
            self._read(piece)

    def _flush(self) -> None:
        for piece in self._reader.finish():
            self._read(piece)

    def _unread(self) -> str:
        return self._reader.pending

    def _read(self, piece: MessagePiece) -> None:
        written = piece.header + piece.text + piece.end
        name = (piece.recipient or "").removeprefix(_FUNCTIONS)
        if not (piece.recipient or "").startswith(_FUNCTIONS) or not name:
            self.reply.say(piece.text if piece.recipient is None else written)
            return
        if piece.header:
            self.reply.open_call(piece.header)
            self.reply.start_call(name)
            self._empty = True
        if piece.text:
            self.reply.wrote(piece.text)
            self.reply.add_arguments(piece.text)
            self._empty = self._empty and not piece.text.strip()
        if piece.end:
            if self._empty:
                self.reply.add_arguments("{}")
            self.reply.end_call()
