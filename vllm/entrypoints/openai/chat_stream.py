# SPDX-License-Identifier: Apache-2.0
"""Chunks of a streamed chat completion."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from vllm.entrypoints.openai.chat_reply import ReplySplitter
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.serving_engine import now
from vllm.entrypoints.openai.stream_usage import StreamUsage
from vllm.entrypoints.openai.streaming import Outlet, TextEvents, event
from vllm.outputs import CompletionOutput, RequestOutput

Build = Callable[[Sequence["RequestOutput"], Callable[[], bytes]], Awaitable[bytes]]

#: keys of a delta whose value is a text
_TEXT_KEYS = ("content", "reasoning")


class ChatStream:
    """Frames new text from templates, and builds all other chunks as plain dicts.

    `splitters`: per choice, what separates its text into reasoning, content and calls, if anything.
    `echoed`: text that every choice begins with. `logprobs`: the object for new tokens.
    `build`: `OpenAIServing.build`.
    """

    def __init__(
        self,
        request: ChatCompletionRequest,
        request_id: str,
        model: str,
        *,
        prompt_ids: list[int],
        splitters: Sequence[ReplySplitter | None],
        role: str,
        echoed: str,
        logprobs: Callable[[CompletionOutput], dict[str, Any] | None],
        usage: StreamUsage,
        build: Build,
    ) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._splitters = splitters
        self._role = role
        self._echoed = echoed
        self._logprobs = logprobs
        self._usage = usage
        self._build = build
        self._head = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": now(),
            "model": model,
        }

        self._wants_tokens = bool(request.logprobs or request.return_token_ids)
        #: whether chunks hold nothing but their delta until their choice ends
        self._only_delta = not (self._wants_tokens or usage.on_every_chunk)
        self.outlet = Outlet()
        #: whether the first chunks are out
        self._started = False
        #: per choice and key of the delta
        self._texts = [
            {key: TextEvents(partial(self._text_chunk, index, key)) for key in _TEXT_KEYS}
            for index in range(request.num_choices)
        ]

    async def events(
        self, source: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[bytes, None]:
        """The encoded events of each output, without `[DONE]`."""
        try:
            async for _, output in source:
                if self._started and self._only_delta and _goes_on(output):
                    (one,) = output.outputs
                    if events := self._go_on(one.index, one.text, len(one.token_ids)):
                        yield events
                    continue
                self._usage.seen(0, output)
                first = not self._started
                events = await self._build([output], partial(self._events, output, first))
                self._started = True
                if events:
                    yield events
        finally:
            await source.aclose()
        if self._usage.at_end:
            yield event({**self._head, "choices": [], "usage": self._usage.as_dict()})

    def take_text(self, index: int, text: str, num_tokens: int) -> bool:
        """Write the event of an output that would hold nothing but new text of choice `index`,
        unless it has to wait or to be more than its delta."""
        if not (self._started and self._only_delta and self.outlet.is_ready):
            return False
        if events := self._go_on(index, text, num_tokens):
            self.outlet.write(events)
        return True

    def _events(self, output: RequestOutput, first: bool) -> bytes:
        events: list[bytes] = []
        if first:
            for index in range(self._request.num_choices):
                events += map(event, self._opening(index))
        for completion in output.outputs:
            if completion.token_ids or completion.finish_reason is not None:
                events += self._delta(output, completion)
        return b"".join(events)

    def _go_on(self, index: int, text: str, num_tokens: int) -> bytes:
        """The event for new tokens of one choice that goes on, where events hold nothing else."""
        self._usage.generated(num_tokens)
        splitter = self._splitters[index]
        if splitter is None:
            return self._texts[index]["content"].event(text)
        delta = splitter.feed(text, finished=False)
        if delta.calls or (delta.reasoning and delta.content):
            return event(self._chunk(index, delta.as_dict()))
        if delta.content:
            return self._texts[index]["content"].event(delta.content)
        if delta.reasoning:
            return self._texts[index]["reasoning"].event(delta.reasoning)
        return b""

    def _text_chunk(self, index: int, key: str, text: str) -> dict[str, Any]:
        return self._chunk(index, {key: text})

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """The chunk that names the role, and the echoed text if there is one."""
        opening = self._chunk(index, {"role": self._role, "content": ""})
        if self._request.return_token_ids:
            opening["prompt_token_ids"] = self._prompt_ids
        if self._echoed:
            return [opening, self._chunk(index, {"content": self._echoed})]
        return [opening]

    def _delta(self, output: RequestOutput, completion: CompletionOutput) -> Iterable[bytes]:
        """The event for new tokens; none while their text is kept back and nothing else is due."""
        self._usage.generated(len(completion.token_ids))
        delta: dict[str, Any] = {"content": completion.text}
        reason = completion.finish_reason
        splitter = self._splitters[completion.index]
        if splitter is not None:
            delta = splitter.feed(completion.text, finished=reason is not None).as_dict()
            reason = splitter.finish_reason(reason)
        if reason is None and not delta and not self._wants_tokens:
            return ()
        chunk = self._chunk(completion.index, delta)
        choice = chunk["choices"][0]
        choice["logprobs"] = self._logprobs(completion)
        if self._request.return_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        if reason is not None:
            choice["finish_reason"] = reason
            choice["stop_reason"] = completion.stop_reason
            if completion.kv_transfer_params is not None:
                chunk["kv_transfer_params"] = completion.kv_transfer_params
            if output.cache_report is not None:
                chunk["cache_report"] = output.cache_report.as_dict()
        return (event(chunk),)

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._usage.on_every_chunk:
            chunk["usage"] = self._usage.as_dict()
        return chunk


def _goes_on(output: RequestOutput) -> bool:
    """Whether the output is new tokens of one choice and nothing else."""
    if len(output.outputs) != 1:
        return False
    completion = output.outputs[0]
    return completion.finish_reason is None and bool(completion.token_ids)
