# SPDX-License-Identifier: Apache-2.0
"""What `vllm bench serve` sends and how it reads streams; time is counted, not waited for."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from vllm.benchmarks import client
from vllm.benchmarks.client import DIALECTS, Requester, RequestOptions
from vllm.benchmarks.datasets import Sample
from vllm.benchmarks.outcome import Outcome

pytestmark = pytest.mark.asyncio

SAMPLE = Sample("hello", 5, 7)


class Stream(httpx.AsyncByteStream):
    """The body in the given pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second after the one before; the first is at 1 s."""
    ticks = itertools.count(1)
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


def events(*chunks: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


async def send(
    reply: httpx.Response | Exception, backend: str = "openai", **options: Any
) -> tuple[Outcome, list[httpx.Request]]:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        requester = Requester(
            http, DIALECTS[backend], RequestOptions("m", "http://s/x", **options), epoch=0.5
        )
        return await requester.send(SAMPLE, 3), seen


def streamed(*pieces: bytes) -> httpx.Response:
    return httpx.Response(200, stream=Stream(list(pieces)))


async def test_completion_is_timed_chunk_by_chunk() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 9}}
    body = events(text("a"), text(""), text("bc"), text("", "length"), usage) + b"data: [DONE]\n\n"
    outcome, _ = await send(streamed(body))
    # Sent at 1 s; a look at the clock per chunk. The closing chunk stands for no token.
    assert outcome == Outcome(
        start=0.5,
        prompt_len=6,
        ttft=1.0,
        itl=[1.0, 1.0],
        latency=3.0,
        output_len=9,
        text="abc",
    )
    assert outcome.tpot == 0.25


async def test_events_may_be_cut_anywhere() -> None:
    body = events(text("é"), text("b")) + b"data: [DONE]\n\n"
    whole, _ = await send(streamed(body))
    outcome, _ = await send(streamed(*(body[i : i + 1] for i in range(len(body)))))
    assert outcome.text == whole.text == "éb" and len(outcome.itl) == 1
    assert outcome.output_len == 2 and outcome.prompt_len == 5


async def test_the_chat_chunks_that_stand_for_tokens() -> None:
    body = events(
        delta(role="assistant", content=""),
        delta(reasoning="hm"),
        delta(content=""),
        delta(content="yes"),
        delta(tool_calls=[{}]),
        delta("stop"),
    )
    outcome, _ = await send(streamed(body), "openai-chat")
    assert outcome.text == "hmyes" and len(outcome.itl) == 3 and outcome.ttft == 2.0


async def test_the_body_of_a_request() -> None:
    options = {
        "extra": {"temperature": 0.0, "ignore_eos": True},
        "headers": {"Authorization": "Bearer k"},
        "request_id_prefix": "run-",
    }
    _, [request] = await send(streamed(events(text("a"))), **options)
    assert json.loads(request.content) == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert request.headers["x-request-id"] == "run-3"
    assert request.headers["authorization"] == "Bearer k" and str(request.url) == "http://s/x"
    _, [request] = await send(streamed(events(text("a"))), "openai-chat")
    body = json.loads(request.content)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["max_completion_tokens"] == 7 and "prompt" not in body


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (httpx.Response(429, text="slow down"), "status 429: slow down"),
        (streamed(events(text("a"), {"error": {"message": "engine died"}})), "engine died"),
        (streamed(b"data: [DONE]\n\n"), "ended without a token"),
        (streamed(b"data: {\n\n"), "DecodeError"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
    ],
)
async def test_failures_are_outcomes(reply: httpx.Response | Exception, words: str) -> None:
    outcome, _ = await send(reply)
    assert outcome.error is not None and words in outcome.error and outcome.latency > 0
