# SPDX-License-Identifier: Apache-2.0
"""The events of a streamed message, and the content blocks that they build up."""

from __future__ import annotations

import hashlib
from typing import Any

import pydantic_core

from vllm.entrypoints.openai.reply_blocks import Block, BlockEvents, BlockKind, Event

#: Anthropic's own key for arguments that are not JSON
_INVALID = "INVALID_JSON"


class MessageEvents(BlockEvents):
    """The `content_block_*` events of one message."""

    def opened(self, block: Block) -> list[Event]:
        start = {"type": "content_block_start", "index": block.index}
        return [{**start, "content_block": _empty(block)}]

    def grew(self, block: Block, piece: str) -> list[Event]:
        if block.kind is BlockKind.REASONING:
            return [_delta(block, "thinking_delta", thinking=piece)]
        if block.kind is BlockKind.TEXT:
            return [_delta(block, "text_delta", text=piece)]
        return [_delta(block, "input_json_delta", partial_json=piece)]

    def closed(self, block: Block) -> list[Event]:
        stop = {"type": "content_block_stop", "index": block.index}
        if block.kind is BlockKind.REASONING:
            return [_delta(block, "signature_delta", signature=_signature(block)), stop]
        return [stop]

    def content(self) -> list[dict[str, Any]]:
        """The content blocks of the whole message."""
        return [_whole(block) for block in self.blocks]


def _delta(block: Block, kind: str, **fields: str) -> Event:
    delta = {"type": kind, **fields}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _empty(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": f"toolu_{block.key}", "name": block.name, "input": {}}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {**_empty(block), "thinking": block.text, "signature": _signature(block)}
    if block.kind is BlockKind.TEXT:
        return {**_empty(block), "text": block.text}
    return {**_empty(block), "input": _arguments(block.text)}


def _signature(block: Block) -> str:
    """A digest of the text: clients drop thinking without a signature. It is never checked."""
    return hashlib.sha256(block.text.encode()).hexdigest()


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as an object; of unfinished JSON what is complete, as stream clients read it."""
    try:
        value = pydantic_core.from_json(text or "{}", allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {_INVALID: text}
