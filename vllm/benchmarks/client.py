# SPDX-License-Identifier: Apache-2.0
"""One streamed request to an OpenAI server, timed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from vllm.benchmarks.datasets import Sample
from vllm.benchmarks.outcome import Outcome

_ERROR_CHARS = 500


@dataclass(frozen=True)
class RequestOptions:
    """What all requests have in common; `extra` are further keys of the body."""

    model: str
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    request_id_prefix: str | None = None


class Dialect(ABC):
    """How an endpoint is asked and what its chunks say."""

    path: str

    @abstractmethod
    def body(self, sample: Sample) -> dict[str, Any]:
        """The prompt and the number of tokens, in this endpoint's words."""

    @abstractmethod
    def piece(self, choice: dict[str, Any]) -> str | None:
        """The text a chunk's choice carries, "" for part of a character, None for no token."""


class Completions(Dialect):
    path = "/v1/completions"

    def body(self, sample: Sample) -> dict[str, Any]:
        return {"prompt": sample.prompt, "max_tokens": sample.output_len}

    def piece(self, choice: dict[str, Any]) -> str | None:
        text: str = choice.get("text") or ""
        return None if not text and choice.get("finish_reason") else text


class Chat(Dialect):
    path = "/v1/chat/completions"

    def body(self, sample: Sample) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": sample.prompt}],
            "max_completion_tokens": sample.output_len,
        }

    def piece(self, choice: dict[str, Any]) -> str | None:
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        text: str = reasoning + (delta.get("content") or "")
        if text or delta.get("tool_calls"):
            return text
        # The chunk that opens a message and the one that ends it stand for no token.
        silent = "role" in delta or choice.get("finish_reason") or delta.get("content") is None
        return None if silent else text


DIALECTS: dict[str, Dialect] = {
    "openai": Completions(),
    "openai-chat": Chat(),
    "vllm": Completions(),
}


class Requester:
    """Sends samples and measures; `epoch` is the benchmark's start on `time.perf_counter`."""

    def __init__(
        self, http: httpx.AsyncClient, dialect: Dialect, options: RequestOptions, epoch: float
    ) -> None:
        self._http = http
        self._dialect = dialect
        self._options = options
        self._epoch = epoch

    async def send(self, sample: Sample, index: int) -> Outcome:
        """Never raises for what the server does: a failure is an outcome with its error."""
        started = time.perf_counter()
        outcome = Outcome(start=started - self._epoch, prompt_len=sample.prompt_len or 0)
        try:
            await self._stream(sample, index, outcome, started)
        except (httpx.HTTPError, msgspec.DecodeError, _ServerError) as error:
            outcome.error = f"{type(error).__name__.lstrip('_')}: {error}"
            outcome.latency = time.perf_counter() - started
        return outcome

    async def _stream(self, sample: Sample, index: int, outcome: Outcome, started: float) -> None:
        options = self._options
        headers = dict(options.headers)
        if options.request_id_prefix is not None:
            headers["X-Request-Id"] = f"{options.request_id_prefix}{index}"
        body = {
            "model": options.model,
            **self._dialect.body(sample),
            "stream": True,
            "stream_options": {"include_usage": True},
            **options.extra,
        }
        pieces: list[str] = []
        last, usage = started, None
        async with self._http.stream("POST", options.url, json=body, headers=headers) as reply:
            if reply.is_error:
                await reply.aread()
                raise _ServerError(f"status {reply.status_code}: {reply.text[:_ERROR_CHARS]}")
            async for data in _events(reply):
                now = time.perf_counter()
                chunk = msgspec.json.decode(data)
                if "error" in chunk:
                    raise _ServerError(str(chunk["error"])[:_ERROR_CHARS])
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ())[:1]:
                    text = self._dialect.piece(choice)
                    if text is not None:
                        if pieces:
                            outcome.itl.append(now - last)
                        else:
                            outcome.ttft = now - started
                        pieces.append(text)
                        last = now
        outcome.latency = last - started
        outcome.text = "".join(pieces)
        if not pieces:
            raise _ServerError("the stream ended without a token")
        # A server that does not report usage streams one token per chunk.
        counts = usage or {}
        outcome.output_len = counts.get("completion_tokens") or len(pieces)
        outcome.prompt_len = counts.get("prompt_tokens") or outcome.prompt_len


class _ServerError(Exception):
    """An error that the server reported."""


async def _events(reply: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event, without the closing `[DONE]`."""
    rest = b""
    async for received in reply.aiter_bytes():
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield data
