# SPDX-License-Identifier: Apache-2.0
"""Deltas of a reply as blocks that open, grow and close."""

from __future__ import annotations

import pytest

from vllm.entrypoints.openai.chat_reply import ReplyDelta
from vllm.entrypoints.openai.reply_blocks import Block, BlockEvents, BlockKind, Event
from vllm.tool_parsers import CallDelta


class Journal(BlockEvents):
    """Notes what happens to which block."""

    def opened(self, block: Block) -> list[Event]:
        assert block.text == "" and self.blocks[block.index] is block
        return [{"open": block.index, "kind": block.kind.name, "name": block.name}]

    def grew(self, block: Block, piece: str) -> list[Event]:
        assert block.text.endswith(piece)
        return [{"grow": block.index, "by": piece}]

    def closed(self, block: Block) -> list[Event]:
        return [{"close": block.index}]


def say(reasoning: str = "", content: str = "", *calls: CallDelta) -> ReplyDelta:
    return ReplyDelta(reasoning, content, calls)


def test_one_block_is_open_at_a_time() -> None:
    journal = Journal()
    events = journal.feed(say("a"))
    events += journal.feed(say("b", "c"))
    events += journal.feed(say("", "d", CallDelta(0, "f", "{")))
    events += journal.feed(say("", "", CallDelta(0, None, "}"), CallDelta(1, "g", "{}")))
    events += journal.close() + journal.close()
    assert events == [
        {"open": 0, "kind": "REASONING", "name": ""},
        {"grow": 0, "by": "a"},
        {"grow": 0, "by": "b"},
        {"close": 0},
        {"open": 1, "kind": "TEXT", "name": ""},
        {"grow": 1, "by": "c"},
        {"grow": 1, "by": "d"},
        {"close": 1},
        {"open": 2, "kind": "CALL", "name": "f"},
        {"grow": 2, "by": "{"},
        {"grow": 2, "by": "}"},
        {"close": 2},
        {"open": 3, "kind": "CALL", "name": "g"},
        {"grow": 3, "by": "{}"},
        {"close": 3},
    ]


def test_arguments_belong_to_the_open_call_before_new_text() -> None:
    journal = Journal()
    journal.feed(say("", "", CallDelta(0, "f", "{")))
    journal.feed(say("", "done", CallDelta(0, None, "}")))
    assert [(block.kind, block.text) for block in journal.blocks] == [
        (BlockKind.CALL, "{}"),
        (BlockKind.TEXT, "done"),
    ]
    assert journal.text_of(BlockKind.TEXT) == "done"


@pytest.mark.parametrize("delta", [say(), say("", "", CallDelta(0, "f", ""))])
def test_nothing_grows_by_nothing(delta: ReplyDelta) -> None:
    assert not [event for event in Journal().feed(delta) if "grow" in event]
