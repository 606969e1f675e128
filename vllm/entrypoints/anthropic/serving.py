# SPDX-License-Identifier: Apache-2.0
"""`/v1/messages` over the chat route."""

import hashlib
from collections.abc import AsyncGenerator
from typing import Any

import pydantic_core

from vllm.entrypoints.anthropic.errors import error_body
from vllm.entrypoints.anthropic.protocol import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    MessageUsage,
    TokenCount,
)
from vllm.entrypoints.anthropic.translate import PARAMETERS, to_chat
from vllm.entrypoints.openai.chat_turn import ChatTurn, ReplyPiece, count_prompt
from vllm.entrypoints.openai.errors import describe
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.reply_blocks import Block, BlockEvents, BlockKind, Event
from vllm.entrypoints.openai.serving_chat import ServingChat
from vllm.entrypoints.openai.serving_engine import RequestContext
from vllm.entrypoints.openai.streaming import EventSource, named_event

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
    call_id = block.call_id or f"toolu_{block.key}"
    return {"type": "tool_use", "id": call_id, "name": block.name, "input": {}}


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


class ServingMessages:
    """Messages in, the next message out."""

    def __init__(self, chat: ServingChat) -> None:
        self.chat = chat

    async def create(
        self, request: MessagesRequest, context: RequestContext
    ) -> Message | EventSource:
        """The message, or its events; raises before anything reaches the engine.

        `max_tokens` may be more than what the context has room for, as clients of this protocol
        send their model's maximum: then the reply may fill the context.
        """
        chat_request = await self._to_chat(request)
        most = request.max_tokens
        turn = await ChatTurn.begin(self.chat, chat_request, context, "msg", PARAMETERS, most)
        reply = MessageReply(turn, most > (turn.planned.params.max_tokens or most))
        if request.stream:
            return EventSource(reply.stream(), end)
        async for piece in turn.pieces():
            reply.take(piece)
        await reply.finish()
        return reply.message

    async def count(self, request: CountTokensRequest, context: RequestContext) -> TokenCount:
        """How many tokens the prompt of `request` has."""
        chat_request = await self._to_chat(request)
        return TokenCount(input_tokens=await count_prompt(self.chat, chat_request, PARAMETERS))

    async def _to_chat(self, request: CountTokensRequest) -> ChatCompletionRequest:
        can_reason = self.chat.parsers.reasoning is not None
        return await self.chat.renderer.run(to_chat, request, can_reason)


class MessageReply:
    """One message while it is generated."""

    def __init__(self, turn: ChatTurn, lowered: bool) -> None:
        """`lowered`: whether `max_tokens` is below what was asked for."""
        self.turn = turn
        self._cut_by_context = lowered and turn.fills_context
        self.message = Message(id=turn.id, model=turn.model, content=[], usage=self._usage())
        self._events = MessageEvents()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The encoded events; the first one comes with the first tokens."""
        source = self.turn.pieces()
        try:
            started = False
            async for piece in source:
                events = self.take(piece)
                if not started:
                    started = True
                    message = self.message.model_dump(exclude_none=True)
                    unknown = {"stop_reason": None, "stop_sequence": None}
                    start = {"type": "message_start", "message": {**message, **unknown}}
                    events.insert(0, start)
                if events:
                    yield b"".join(map(named_event, events))
        finally:
            await source.aclose()
        yield b"".join(map(named_event, await self.finish()))

    def take(self, piece: ReplyPiece) -> list[Event]:
        """Add `piece`; its events."""
        message = self.message
        message.usage = self._usage()
        if piece.finish_reason is not None:
            message.stop_reason = self._stop_reason(piece)
            if message.stop_reason == "stop_sequence":
                message.stop_sequence = str(piece.stop_reason)
        return self._events.feed(piece.delta)

    async def finish(self) -> list[Event]:
        """Complete the message; the events that end it."""
        events = self._events.close()
        message = self.message
        message.content = self._events.content()
        message.usage.output_tokens_details = await self._details()
        stop = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        usage = message.usage.model_dump(exclude_none=True)
        events.append({"type": "message_delta", "delta": stop, "usage": usage})
        events.append({"type": "message_stop"})
        return events

    async def _details(self) -> dict[str, int] | None:
        details = {}
        thinking = self._events.text_of(BlockKind.REASONING)
        if thinking:
            details["thinking_tokens"] = min(await self.turn.count(thinking), self.turn.num_tokens)
        if self.turn.num_drafts is not None:
            accepted, rejected = self.turn.num_drafts
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = rejected
        return details or None

    def _stop_reason(self, piece: ReplyPiece) -> str:
        if piece.finish_reason == "length":
            return "model_context_window_exceeded" if self._cut_by_context else "max_tokens"
        if piece.finish_reason == "tool_calls":
            return "tool_use"
        return "stop_sequence" if isinstance(piece.stop_reason, str) else "end_turn"

    def _usage(self) -> MessageUsage:
        turn = self.turn
        return MessageUsage(
            input_tokens=turn.num_prompt - turn.num_cached,
            cache_read_input_tokens=turn.num_cached,
            output_tokens=turn.num_tokens,
        )


def end(error: Exception | None) -> bytes:
    """What follows the last event of a stream: nothing, or an error event."""
    if error is None:
        return b""
    info = describe(error)
    return named_event(error_body(info.status, info.message, info.param))
