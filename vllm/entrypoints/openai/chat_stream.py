# SPDX-License-Identifier: Apache-2.0
"""Chunks of a streamed chat completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.serving_engine import now
from vllm.entrypoints.openai.stream_usage import StreamUsage
from vllm.entrypoints.openai.streaming import event

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_reply import ReplySplitter
    from vllm.outputs import CompletionOutput, RequestOutput


class ChatStream:
    """Builds chunks as plain dicts: this runs once per token of every stream.

    `splitters`: per choice, what separates its text into reasoning, content and calls, if anything.
    `echoed`: text that every choice begins with. `logprobs`: the object for new tokens.
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
    ) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._splitters = splitters
        self._role = role
        self._echoed = echoed
        self._logprobs = logprobs
        self._usage = usage
        self._head = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": now(),
            "model": model,
        }

    async def events(
        self, source: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[bytes, None]:
        """The encoded events, without `[DONE]`."""
        started = False
        try:
            async for _, output in source:
                self._usage.seen(0, output)
                if not started:
                    started = True
                    for index in range(self._request.num_choices):
                        for chunk in self._opening(index):
                            yield event(chunk)
                for completion in output.outputs:
                    if completion.token_ids or completion.finish_reason is not None:
                        grown = self._delta(output, completion)
                        if grown is not None:
                            yield event(grown)
        finally:
            await source.aclose()
        if self._usage.at_end:
            yield event({**self._head, "choices": [], "usage": self._usage.as_dict()})

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """The chunk that names the role, and the echoed text if there is one."""
        opening = self._chunk(index, {"role": self._role, "content": ""})
        if self._request.return_token_ids:
            opening["prompt_token_ids"] = self._prompt_ids
        if self._echoed:
            return [opening, self._chunk(index, {"content": self._echoed})]
        return [opening]

    def _delta(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | None:
        """The chunk for new tokens; None while their text is kept back and nothing else is due."""
        self._usage.generated(len(completion.token_ids))
        delta: dict[str, Any] = {"content": completion.text}
        reason = completion.finish_reason
        splitter = self._splitters[completion.index]
        if splitter is not None:
            delta = splitter.feed(completion.text, finished=reason is not None).as_dict()
            reason = splitter.finish_reason(reason)
        wants_tokens = self._request.logprobs or self._request.return_token_ids
        if not delta and reason is None and not wants_tokens:
            return None
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
        return chunk

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._usage.on_every_chunk:
            chunk["usage"] = self._usage.as_dict()
        return chunk
