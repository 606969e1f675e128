# SPDX-License-Identifier: Apache-2.0
"""A reply as a sequence of blocks, for protocols that open, extend and close the parts of one."""

import enum
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.openai.chat_reply import ReplyDelta

Event = dict[str, Any]


class BlockKind(enum.Enum):
    """What a block holds."""

    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass
class Block:
    """One part of a reply; `text` is the arguments' JSON text where the part is a call."""

    kind: BlockKind
    #: its place among the reply's blocks
    index: int
    #: the tool that is called
    name: str = ""
    text: str = ""
    #: the call's id as the model wrote it
    call_id: str | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


class BlockEvents(ABC):
    """Turns the deltas of one reply into a protocol's events; a subclass writes the events.

    One block is open at a time: a delta of another kind, and every new call, closes it.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    @abstractmethod
    def opened(self, block: Block) -> list[Event]:
        """The events that begin `block`, which is empty."""

    @abstractmethod
    def grew(self, block: Block, piece: str) -> list[Event]:
        """The events that append `piece`, already part of `block.text`."""

    @abstractmethod
    def closed(self, block: Block) -> list[Event]:
        """The events that end `block`."""

    def feed(self, delta: ReplyDelta) -> list[Event]:
        """The events of one delta: what belongs to the open call comes before anything new, and
        what was said after a new call behind it."""
        before = len(delta.content) - delta.tail
        events: list[Event] = []
        for call in delta.calls:
            if call.name is None:
                events += self._extend(call.arguments)
        events += self._say(BlockKind.REASONING, delta.reasoning)
        events += self._say(BlockKind.TEXT, delta.content[:before])
        for call in delta.calls:
            if call.name is not None:
                events += self.begin(BlockKind.CALL, call.name, call.call_id)
                events += self._extend(call.arguments)
        return events + self._say(BlockKind.TEXT, delta.content[before:])

    def begin(self, kind: BlockKind, name: str = "", call_id: str | None = None) -> list[Event]:
        """Close the open block and open a new one."""
        events = self.close()
        self._open = Block(kind, len(self.blocks), name, call_id=call_id)
        self.blocks.append(self._open)
        return events + self.opened(self._open)

    def close(self) -> list[Event]:
        """Close the open block, if there is one."""
        block, self._open = self._open, None
        return [] if block is None else self.closed(block)

    def text_of(self, kind: BlockKind) -> str:
        """All text of the blocks of one kind."""
        return "".join(block.text for block in self.blocks if block.kind is kind)

    def _say(self, kind: BlockKind, piece: str) -> list[Event]:
        if not piece:
            return []
        if self._open is not None and self._open.kind is kind:
            return self._extend(piece)
        return self.begin(kind) + self._extend(piece)

    def _extend(self, piece: str) -> list[Event]:
        if not piece or self._open is None:
            return []
        self._open.text += piece
        return self.grew(self._open, piece)
