# SPDX-License-Identifier: Apache-2.0
"""Chunks of a streamed chat completion."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from vllm.entrypoints.openai.chat_reply import ReplySplitter
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.reply_stream import TextStream
from vllm.entrypoints.openai.serving_engine import OpenAIServing, Planned, now
from vllm.entrypoints.openai.streaming import TextEvents, event
from vllm.outputs import CompletionOutput, RequestOutput

#: keys of a delta whose value is a text
_TEXT_KEYS = ("content", "reasoning")


class ChatStream(TextStream):
    """Frames new text from templates, and builds all other chunks as plain dicts.

    `splitters`: per choice, what separates its text into reasoning, content and calls, if anything.
    `echoed`: text that every choice begins with. `logprobs`: the object for new tokens.
    """

    def __init__(
        self,
        serving: OpenAIServing,
        request: ChatCompletionRequest,
        planned: Planned,
        model: str,
        *,
        splitters: Sequence[ReplySplitter | None],
        role: str,
        echoed: str,
        logprobs: Callable[[CompletionOutput], dict[str, Any] | None],
    ) -> None:
        head = {
            "id": planned.request_id,
            "object": "chat.completion.chunk",
            "created": now(),
            "model": model,
        }
        super().__init__(serving, request, [len(planned.prompt.token_ids)], head)
        self._request = request
        self._prompt_ids = planned.prompt.token_ids
        self._splitters = splitters
        self._role = role
        self._echoed = echoed
        self._logprobs = logprobs
        self._wants_tokens = bool(request.logprobs or request.return_token_ids)
        #: whether chunks hold nothing but their delta until their choice ends
        self._only_delta = not (self._wants_tokens or self._usage_on_every_chunk)
        #: whether the first chunks are made
        self._started = False
        #: per choice and key of the delta
        self._texts = [
            {key: TextEvents(partial(self._text_chunk, index, key)) for key in _TEXT_KEYS}
            for index in range(request.num_choices)
        ]

    def _events(self, prompt_index: int, output: RequestOutput) -> bytes:
        events: list[bytes] = []
        if not self._started:
            for index in range(self._num_choices):
                events += map(event, self._opening(index))
            self._started = True
        for completion in output.outputs:
            if completion.token_ids or completion.finish_reason is not None:
                events += self._delta(output, completion)
        return b"".join(events)

    def _goes_on(self, index: int) -> bool:
        return self._started and self._only_delta

    def _text_event(self, index: int, text: str) -> bytes:
        splitter = self._splitters[index]
        if splitter is None:
            return self._texts[index]["content"].event(text)
        delta = splitter.feed(text, finished=False)
        if delta.calls or (delta.reasoning and delta.content):
            return event(self._choice_chunk(index, delta.as_dict()))
        if delta.content:
            return self._texts[index]["content"].event(delta.content)
        if delta.reasoning:
            return self._texts[index]["reasoning"].event(delta.reasoning)
        return b""

    def _text_chunk(self, index: int, key: str, text: str) -> dict[str, Any]:
        return self._choice_chunk(index, {key: text})

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """The chunk that names the role, and the echoed text if there is one."""
        opening = self._choice_chunk(index, {"role": self._role, "content": ""})
        if self._request.return_token_ids:
            opening["prompt_token_ids"] = self._prompt_ids
        if self._echoed:
            return [opening, self._choice_chunk(index, {"content": self._echoed})]
        return [opening]

    def _delta(self, output: RequestOutput, completion: CompletionOutput) -> Iterable[bytes]:
        """The event for new tokens; none while their text is kept back and nothing else is due."""
        self._num_generated += len(completion.token_ids)
        delta: dict[str, Any] = {"content": completion.text}
        reason = completion.finish_reason
        splitter = self._splitters[completion.index]
        if splitter is not None:
            delta = splitter.feed(completion.text, finished=reason is not None).as_dict()
            reason = splitter.finish_reason(reason)
        if reason is None and not delta and not self._wants_tokens:
            return ()
        chunk = self._choice_chunk(completion.index, delta)
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

    def _choice_chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return self._chunk(
            [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        )
