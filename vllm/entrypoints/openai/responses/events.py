# SPDX-License-Identifier: Apache-2.0
"""The events of a streamed response, and the items that they build up."""

from typing import Any

import msgspec

from vllm.entrypoints.openai.chat_turn import ReplyPiece
from vllm.entrypoints.openai.reply_blocks import Block, BlockEvents, BlockKind, Event
from vllm.entrypoints.openai.responses.translate import encode_reasoning

_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_DELTAS = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponseEvents(BlockEvents):
    """Numbers the events of one response; each block becomes one output item."""

    def __init__(self, encrypted_reasoning: bool) -> None:
        super().__init__()
        self._encrypted_reasoning = encrypted_reasoning
        self._num_events = 0
        #: entries of tokens whose text was not seen yet, and how many came with the last piece
        self._pending: list[msgspec.Raw] = []
        self._num_new = 0
        #: entries of the text, by block index
        self._logprobs: dict[int, list[msgspec.Raw]] = {}
        #: of items that end from now on
        self.status = "completed"
        #: the items that have ended
        self.output: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> Event:
        """The next event of the stream."""
        numbered = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return numbered

    def feed_piece(self, piece: ReplyPiece) -> list[Event]:
        """The events of one piece of the reply."""
        # Encoded at once: they are sent up to four times, and all together at the end.
        self._pending += [msgspec.Raw(msgspec.json.encode(entry)) for entry in piece.logprobs]
        self._num_new = len(piece.logprobs)
        return self.feed(piece.delta)

    def opened(self, block: Block) -> list[Event]:
        if block.index > 0:
            # What was kept back before is the tag between the two blocks.
            self._pending = self._pending[len(self._pending) - self._num_new :]
        item = self._item(block, "in_progress")
        events = [self.event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind is not BlockKind.CALL:
            part = self._part(block)
            events.append(self.event("response.content_part.added", **self._at(block), part=part))
        return events

    def grew(self, block: Block, piece: str) -> list[Event]:
        logprobs, self._pending = self._pending, []
        extra: dict[str, Any] = {}
        if block.kind is BlockKind.TEXT:
            self._logprobs.setdefault(block.index, []).extend(logprobs)
            extra["logprobs"] = logprobs
        kind = _DELTAS[block.kind] + ".delta"
        return [self.event(kind, **self._at(block), delta=piece, **extra)]

    def closed(self, block: Block) -> list[Event]:
        done = _DELTAS[block.kind] + ".done"
        at = self._at(block)
        events = []
        if block.kind is BlockKind.CALL:
            events.append(self.event(done, **at, name=block.name, arguments=block.text))
        else:
            part = self._part(block)
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events.append(self.event(done, **at, text=block.text, **logprobs))
            events.append(self.event("response.content_part.done", **at, part=part))
        item = self._item(block, self.status)
        self.output.append(item)
        events.append(self.event("response.output_item.done", output_index=block.index, item=item))
        return events

    def _at(self, block: Block) -> dict[str, Any]:
        place = {"item_id": _item_id(block), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs.get(block.index, [])
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": list(logprobs),
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """`block` as an output item; its content is empty while the item is announced."""
        head = {"id": _item_id(block), "status": status}
        content = [] if status == "in_progress" else [self._part(block)]
        if block.kind is BlockKind.TEXT:
            return {"type": "message", **head, "role": "assistant", "content": content}
        if block.kind is BlockKind.CALL:
            call_id = block.call_id or f"call_{block.key}"
            call = {"call_id": call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **head, **call}
        encrypted = encode_reasoning(block.text) if self._encrypted_reasoning else None
        return {
            "type": "reasoning",
            **head,
            "summary": [],
            "content": content,
            "encrypted_content": encrypted,
        }


def _item_id(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{block.key}"
