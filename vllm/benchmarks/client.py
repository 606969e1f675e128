# SPDX-License-Identifier: Apache-2.0
"""One streamed request to an OpenAI server: sent and timed first, read when there is time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.benchmarks.connection import ConnectionPool, Endpoint, ExchangeError, Reply
from vllm.benchmarks.outcome import Outcome, Sample

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


def encode_request(
    endpoint: Endpoint, dialect: Dialect, options: RequestOptions, sample: Sample, index: int
) -> bytes:
    """Head and body of request number `index`."""
    headers = dict(options.headers)
    if options.request_id_prefix is not None:
        headers["X-Request-Id"] = f"{options.request_id_prefix}{index}"
    body = {
        "model": options.model,
        **dialect.body(sample),
        "stream": True,
        "stream_options": {"include_usage": True},
        **options.extra,
    }
    return endpoint.request(headers, msgspec.json.encode(body))


@dataclass
class Exchange:
    """A request that is over: what came back and when. Seconds of one clock.

    `error` is set when the connection did not bring a whole reply.
    """

    started: float
    ended: float
    reply: Reply
    error: str | None = None

    def measure(self, dialect: Dialect, epoch: float, prompt_len: int) -> Outcome:
        """Read the events; what the server did wrong is the outcome's `error`.

        `epoch` is the benchmark's start on the same clock, `prompt_len` what the tokenizer counted.
        """
        outcome = Outcome(start=self.started - epoch, prompt_len=prompt_len)
        try:
            outcome.latency = _read(self.reply, dialect, self.started, outcome)
        except (msgspec.DecodeError, _ServerError) as error:
            outcome.error = f"{type(error).__name__.lstrip('_')}: {error}"
        outcome.error = self.error or outcome.error
        if outcome.error is not None:
            outcome.latency = self.ended - self.started
        return outcome


async def send(pool: ConnectionPool, request: bytes) -> Exchange:
    """Send one encoded request; never raises for what the server does."""
    started = time.perf_counter()
    reply = Reply()
    problem: str | None = None
    try:
        await pool.exchange(request, reply)
    except ExchangeError as error:
        problem = f"ConnectionError: {error}"
    return Exchange(started, time.perf_counter(), reply, problem)


class _ServerError(Exception):
    """An error that the server reported."""


def _read(reply: Reply, dialect: Dialect, started: float, outcome: Outcome) -> float:
    """Fill `outcome`; returns the seconds from `started` to the last token."""
    if reply.status >= 300:
        text = reply.body.decode("utf-8", "replace")
        raise _ServerError(f"status {reply.status}: {text[:_ERROR_CHARS]}")
    pieces: list[str] = []
    last, usage = started, None
    for now, data in reply.events():
        chunk = msgspec.json.decode(data)
        if not isinstance(chunk, dict):
            raise _ServerError(f"an event that is no object: {data[:_ERROR_CHARS]!r}")
        if "error" in chunk:
            raise _ServerError(str(chunk["error"])[:_ERROR_CHARS])
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ())[:1]:
            piece = dialect.piece(choice)
            if piece is not None:
                if pieces:
                    outcome.itl.append(now - last)
                else:
                    outcome.ttft = now - started
                pieces.append(piece)
                last = now
    outcome.text = "".join(pieces)
    if not pieces:
        raise _ServerError("the stream ended without a token")
    # A server that does not report usage streams one token per chunk.
    counts = usage or {}
    outcome.output_len = counts.get("completion_tokens") or len(pieces)
    outcome.prompt_len = counts.get("prompt_tokens") or outcome.prompt_len
    return last - started
