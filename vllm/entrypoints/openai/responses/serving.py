# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` over the chat route."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from vllm.entrypoints.openai.chat_turn import ChatTurn, ReplyPiece, count_prompt
from vllm.entrypoints.openai.errors import describe
from vllm.entrypoints.openai.reply_blocks import BlockKind
from vllm.entrypoints.openai.responses.events import ResponseEvents
from vllm.entrypoints.openai.responses.protocol import (
    InputTokens,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.translate import PARAMETERS, repeated, to_chat
from vllm.entrypoints.openai.serving_chat import ServingChat
from vllm.entrypoints.openai.serving_engine import RequestContext, now
from vllm.entrypoints.openai.streaming import EventSource, named_event


class ServingResponses:
    """Items in, the next items out. Nothing is stored: the client keeps the conversation."""

    def __init__(self, chat: ServingChat) -> None:
        self.chat = chat

    async def create(
        self, request: ResponsesRequest, context: RequestContext
    ) -> bytes | EventSource:
        """The encoded response, or its events; raises before anything reaches the engine."""
        chat_request = await self.chat.renderer.run(to_chat, request)
        turn = await ChatTurn.begin(self.chat, chat_request, context, "resp", PARAMETERS)
        reply = ResponseReply(request, turn, await self.chat.renderer.run(repeated, request))
        if request.stream:
            return EventSource(reply.stream(), reply.end)
        async for piece in turn.pieces():
            reply.take(piece)
        await reply.finish()
        return await self.chat.renderer.run(msgspec.json.encode, reply.response)

    async def count(self, request: ResponsesRequest, context: RequestContext) -> InputTokens:
        """How many tokens the prompt of `request` has."""
        chat_request = await self.chat.renderer.run(to_chat, request)
        return InputTokens(input_tokens=await count_prompt(self.chat, chat_request, PARAMETERS))


class ResponseReply:
    """One response while it is generated."""

    def __init__(
        self, request: ResponsesRequest, turn: ChatTurn, fields: dict[str, msgspec.Raw]
    ) -> None:
        """`fields` are those of the request that the response repeats, encoded."""
        self.turn = turn
        self.response = _announced(request, turn, fields)
        self._events = ResponseEvents(request.wants_encrypted_reasoning)
        self._reason: str | None = None

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The encoded events; the first ones come with the first tokens."""
        source = self.turn.pieces()
        try:
            started = False
            async for piece in source:
                if not started:
                    started = True
                    yield self._whole("response.created") + self._whole("response.in_progress")
                events = self.take(piece)
                if events:
                    yield b"".join(map(named_event, events))
        finally:
            await source.aclose()
        last = await self.finish()
        # Each of these holds the whole text, with its logprobs.
        yield await self.turn.chat.renderer.run(self._ending, last)

    def _ending(self, last: list[dict[str, Any]]) -> bytes:
        return b"".join(map(named_event, last)) + self._whole(f"response.{self.response.status}")

    def take(self, piece: ReplyPiece) -> list[dict[str, Any]]:
        """Add `piece`; its events."""
        self._reason = piece.finish_reason
        return self._events.feed_piece(piece)

    async def finish(self) -> list[dict[str, Any]]:
        """Complete the response; the events that end its last item."""
        cut = self._reason == "length"
        self._events.status = "incomplete" if cut else "completed"
        events = []
        kinds = {block.kind for block in self._events.blocks}
        if not cut and not kinds & {BlockKind.TEXT, BlockKind.CALL}:
            # A reply that ends without a word is an empty message: agents wait for one.
            events += self._events.begin(BlockKind.TEXT)
        events += self._events.close()
        response = self.response
        response.status = "incomplete" if cut else "completed"
        response.incomplete_details = {"reason": "max_output_tokens"} if cut else None
        response.completed_at = None if cut else now()
        response.output = self._events.output
        response.usage = await self._usage()
        return events

    def end(self, error: Exception | None) -> bytes:
        """What follows the last event; after `error`, the events of a failed response."""
        if error is None:
            return b""
        info = describe(error)
        failed = self._events.event("error", code=info.type, message=info.message, param=info.param)
        self.response.status = "failed"
        self.response.output = self._events.output
        code = "server_error" if info.status >= 500 else "invalid_prompt"
        self.response.error = {"code": code, "message": info.message}
        return named_event(failed) + self._whole("response.failed")

    def _whole(self, kind: str) -> bytes:
        """The event that carries the response as a whole."""
        return named_event(self._events.event(kind, response=self.response))

    async def _usage(self) -> ResponseUsage:
        reasoning = await self.turn.count(self._events.text_of(BlockKind.REASONING))
        accepted, rejected = self.turn.num_drafts or (None, None)
        return ResponseUsage(
            input_tokens=self.turn.num_prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=self.turn.num_cached),
            output_tokens=self.turn.num_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=min(reasoning, self.turn.num_tokens),
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=rejected,
            ),
            total_tokens=self.turn.num_prompt + self.turn.num_tokens,
        )


def _announced(
    request: ResponsesRequest, turn: ChatTurn, fields: dict[str, msgspec.Raw]
) -> ResponseObject:
    """The response before its first token: what was asked, with the values that apply."""
    params = turn.planned.params
    reasoning = request.reasoning
    return ResponseObject(
        id=turn.id,
        created_at=now(),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        model=turn.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
        temperature=params.temperature,
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        user=request.user,
        text=fields["text"],
        tool_choice=fields["tool_choice"],
        tools=fields["tools"],
        metadata=fields["metadata"],
    )
