# SPDX-License-Identifier: Apache-2.0
"""Nothing that a request asks for keeps the event loop, and with it all other clients, busy.

The server and the engine are real but for the model; counted is the loop's own CPU time, relative
to that of some other work, so that neither a slow machine nor a busy one changes the result.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.hostile_clients import attacks
from benchmarks.token_source import make_config
from tests.entrypoints.scoring_executor import ScoringExecutor
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.utils.imports import gc_paused
from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = pytest.mark.slow

#: longest time that one callback may take on a core that does `other_work` in `_WORK_S`
LIMIT_S = 0.010
_WORK_S = 0.005
_ATTEMPTS = 3
JSON = {"content-type": "application/json"}

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATE = "/inference/v1/generate"
USER = {"role": "user", "content": "a"}
LONG = [i % 4000 for i in range(4000)]
TOP = {"messages": [USER], "logprobs": True, "top_logprobs": 20}
SHORT = {"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 1.0}
BIASES = {str(token): 1.0 for token in range(1024)}
WITHIN: dict[str, tuple[str, Any]] = {
    "long prompt of ids": (COMPLETIONS, {**SHORT, "prompt": [i % 500 for i in range(4090)]}),
    "much too long a prompt": (COMPLETIONS, {**SHORT, "prompt": [1] * 500_000}),
    "all tokens allowed": (COMPLETIONS, {**SHORT, "allowed_token_ids": list(range(4000))}),
    "n": (COMPLETIONS, {**SHORT, "n": 256, "logit_bias": BIASES}),
    "prompts": (COMPLETIONS, {**SHORT, "prompt": [[1, 2]] * 256, "logit_bias": BIASES}),
    "texts": (COMPLETIONS, {**SHORT, "prompt": ["hello world"] * 256}),
    "stops": (COMPLETIONS, {**SHORT, "stop": ["x" * 64] * 64, "stop_token_ids": [5] * 1024}),
    "bad words": (COMPLETIONS, {**SHORT, "bad_words": [f"w{i}" for i in range(1024)]}),
    "schema": (COMPLETIONS, {**SHORT, "structured_outputs": {
        "choice": [f"choice {i}" for i in range(3000)]}}),
    "messages": (CHAT, {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * 4000}),
    "tools": (CHAT, {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "tools": [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}}
        for i in range(512)]}),
    "unknown keys": (COMPLETIONS, {**SHORT, **{f"key{i}": i for i in range(50_000)}}),
    "wrong entries": (COMPLETIONS, {**SHORT, "stop_token_ids": ["x"] * 100_000}),
    "wrong messages": (CHAT, {"messages": ["x"] * 100_000}),
    "nested prompts": (COMPLETIONS, {**SHORT, "prompt": [[1]] * 100_000}),
    "items": (RESPONSES, {"max_output_tokens": 1, "input": [USER] * 4000}),
    "repeated tools": (RESPONSES, {"max_output_tokens": 1, "stream": True, "input": "a", "tools": [
        {"type": "function", "name": f"f{i}", "parameters": {"enum": [str(j) for j in range(500)]}}
        for i in range(512)], "tool_choice": "none"}),
    "old calls": (RESPONSES, {"max_output_tokens": 1, "input": [
        {"type": "function_call", "call_id": "c", "name": "f",
         "arguments": json.dumps({"a": [1] * 100_000})}]}),
    "wrong items": (RESPONSES, {"input": ["x"] * 100_000}),
    "blocks": (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "a"}] * 50_000}]}),
    "wrong blocks": (MESSAGES, {"max_tokens": 1, "messages": [USER] * 3000, "tools": [1] * 99_999}),
    "connector parameters": (COMPLETIONS, {**SHORT, "vllm_xargs": {"a": [1] * 200_000}}),
}  # fmt: skip
#: served, not refused
SCORED: dict[str, tuple[str, Any]] = {
    "prompt logprobs": (COMPLETIONS, {**SHORT, "prompt": LONG, "prompt_logprobs": 20}),
    "prompt logprobs of a chat": (CHAT, {
        "max_tokens": 1, "messages": [{"role": "user", "content": " ".join(["the"] * 3000)}],
        "prompt_logprobs": 20}),
    "prompt logprobs of ids": (GENERATE, {
        "token_ids": LONG, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 20}}),
    "echo": (COMPLETIONS, {**SHORT, "prompt": LONG, "echo": True, "logprobs": 20}),
    "streamed echo": (COMPLETIONS, {
        **SHORT, "prompt": LONG, "echo": True, "logprobs": 20, "stream": True}),
    "echo alone": (COMPLETIONS, {**SHORT, "prompt": LONG, "echo": True, "max_tokens": 0,
                                 "logprobs": 20}),
    "n logprobs": (COMPLETIONS, {**SHORT, "n": 64, "logprobs": 20, "max_tokens": 20}),
    "streamed n logprobs": (COMPLETIONS, {
        **SHORT, "n": 64, "logprobs": 20, "max_tokens": 20, "stream": True}),
    "long logprobs": (CHAT, {**TOP, "max_tokens": 1000}),
    "streamed logprobs of n chats": (CHAT, {**TOP, "n": 64, "max_tokens": 20, "stream": True}),
    "streamed logprobs of long chats": (CHAT, {**TOP, "n": 9, "max_tokens": 500, "stream": True}),
    "logprobs of ids": (GENERATE, {
        "token_ids": [1, 2], "sampling_params": {"max_tokens": 1000, "logprobs": 20}}),
    "logprobs of a response": (RESPONSES, {
        "input": "a", "max_output_tokens": 1000, "top_logprobs": 20,
        "include": ["message.output_text.logprobs"]}),
    "streamed logprobs of a response": (RESPONSES, {
        "input": "a", "max_output_tokens": 1000, "top_logprobs": 20, "stream": True,
        "include": ["message.output_text.logprobs"]}),
}  # fmt: skip
WITHIN |= SCORED
for _attack in attacks(seed=0):
    WITHIN[f"attack: {_attack.name}"] = (_attack.path, _attack.body)


def limit_s() -> float:
    """`LIMIT_S`, longer on a core that is slower now."""
    return LIMIT_S * max(1.0, min(other_work() for _ in range(3)) / _WORK_S)


def other_work() -> float:
    """CPU seconds of this thread for what callbacks do: parsing, and small Python objects."""
    data = json.dumps([{"a": i, "b": [str(i)]} for i in range(2000)])
    began = time.thread_time()
    for _ in range(2):
        json.loads(data)
    assert sum(len(str(i)) for i in range(20_000)) == 88_890
    return time.thread_time() - began


class Callbacks:
    """CPU seconds of every callback of the event loop, the longest one first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest: tuple[float, str] = (0.0, "")
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            self.longest = max(self.longest, (time.thread_time() - began, repr(handle)))

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)


class Packed(httpx.SyncByteStream):
    """A body in the encoding that the server chose."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


@pytest.mark.usefixtures("forking")
def test_no_callback_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner
) -> None:
    engine = AsyncLLM(make_config(tmp_path, max_num_seqs=64, step_s=0.001), ScoringExecutor)
    app = build_app(engine, FrontEndArgs())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    async def post(client: httpx.AsyncClient, path: str, data: bytes) -> httpx.Response:
        """The reply as it comes: to unpack it on this loop would count, too."""
        async with client.stream("POST", path, content=data, headers=JSON, timeout=120) as reply:
            return httpx.Response(
                reply.status_code,
                headers=reply.headers,
                stream=Packed([part async for part in reply.aiter_raw()]),
            )

    async def longest(
        client: httpx.AsyncClient, path: str, data: bytes
    ) -> tuple[tuple[float, str], httpx.Response]:
        with gc_paused(), monkeypatch.context() as patch:
            callbacks = Callbacks(patch)
            # In a task of its own, so that its last callback is over when we look.
            reply = await asyncio.create_task(post(client, path, data))
        reply.read()
        assert reply.status_code in (200, 400), reply.text
        return callbacks.longest, reply

    async def main() -> dict[str, tuple[float, str]]:
        slow = {}
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await client.post(COMPLETIONS, json={"prompt": "warm up", "max_tokens": 1})
            for name, (path, body) in WITHIN.items():
                data = json.dumps(body).encode()
                # A busy machine makes the same work longer, now and then.
                for _ in range(_ATTEMPTS):
                    found, reply = await longest(client, path, data)
                    if name in SCORED:
                        assert reply.status_code == 200 and "logprob" in reply.text, reply.text
                    if found[0] <= LIMIT_S or found[0] <= limit_s():
                        break
                else:
                    slow[name] = found
        return slow

    try:
        assert runner.run(main()) == {}
    finally:
        engine.shutdown()
