# SPDX-License-Identifier: Apache-2.0
"""Text written without waking its stream's task: the same events as by the long way."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.token_source import TokenExecutor, make_config
from vllm.config import VllmConfig
from vllm.entrypoints.http_protocol import _KEY, PieceWriter
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.entrypoints.openai.streaming import DONE, event
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PARSERS = FrontEndArgs(
    reasoning_parser="qwen3", tool_call_parser="qwen3_coder", enable_auto_tool_choice=True
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
#: of every reply; half of a chat's is reasoning
TOKENS = 40


class CountingExecutor(TokenExecutor):
    """A reply's tokens depend on their places in it alone."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._places: Counter[str] = Counter()

    def _token(self, row: int, req_id: str) -> int:
        place = self._places[req_id]
        self._places[req_id] += 1
        if place == self._reasoning_tokens:
            return self._end_of_reasoning
        return (place * 37 + 300) % self._vocab_size


@dataclass
class Connection:
    """The server's end: what uvicorn keeps of one reply. Pieces are marked by how they came."""

    write_paused: bool = False
    disconnected: bool = False
    response_complete: bool = False
    chunked_encoding: bool | None = None
    sent: list[bytes] = field(default_factory=list)
    written: list[bytes] = field(default_factory=list)
    body: bytes = b""

    @property
    def flow(self) -> Connection:
        return self

    @property
    def transport(self) -> Connection:
        return self

    def write(self, data: bytes) -> None:
        size, _, rest = data.partition(b"\r\n")
        piece = rest.removesuffix(b"\r\n")
        assert len(piece) == int(size, 16)
        self.written.append(piece)
        self.body += piece

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            self.chunked_encoding = True
            return
        self.sent.append(message["body"])
        self.body += message["body"]
        self.response_complete = not message["more_body"]

    def texts(self) -> dict[tuple[int, str], str]:
        """By choice and key; checks that all events are canonical."""
        found: dict[tuple[int, str], str] = {}
        *events, done, end = self.body.split(b"\n\n")
        assert done + b"\n\n" == DONE and end == b""
        for one in events:
            chunk = json.loads(one.removeprefix(b"data: "))
            assert one + b"\n\n" == event(chunk)
            for choice in chunk["choices"]:
                for key, text in choice.get("delta", {"text": choice.get("text")}).items():
                    if key != "role":
                        at = choice["index"], key
                        found[at] = found.get(at, "") + text
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncLLM]:
    config = make_config(tmp_path_factory.mktemp("model"), 64, 0.002, reasoning_tokens=TOKENS // 2)
    running = AsyncLLM(config, CountingExecutor)
    yield running
    running.shutdown()


async def post(
    app: Any, connection: Connection, body: dict[str, Any], writes: bool = True
) -> Connection:
    data = json.dumps({"stream": True, "ignore_eos": True, "max_tokens": TOKENS, **body}).encode()
    unread = [{"type": "http.request", "body": data}]

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()
        raise AssertionError

    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json")], "http_version": "1.1"}
    scope |= {"scheme": "http", "root_path": ""}
    if writes:
        scope[_KEY] = PieceWriter(connection)  # type: ignore[arg-type]
    await app(scope, receive, connection.send)
    return connection


async def post_until_written(app: Any, body: dict[str, Any]) -> Connection:
    """A reply of which something went the short way: nothing does when all of it comes at once, as
    after a pause of the machine."""
    for _ in range(10):
        connection = await post(app, Connection(), body)
        if connection.written:
            break
    return connection


BODIES = [
    {"prompt": "hi"},
    {"prompt": "hi", "n": 2},
    {"prompt": "hi", "stop": ["no such text"]},
    {"prompt": ["hi", "you"]},
    {"prompt": "hi", "logprobs": None, "stream_options": {"include_usage": True}},
    CHAT,
    {**CHAT, "n": 2, "tools": [TOOL]},
]
#: those whose text cannot go the short way: it may be taken back, or streams are mixed
LONG = (2, 3)


async def test_both_ways_send_the_same(engine: AsyncLLM) -> None:
    app = build_app(engine, PARSERS)
    for number, body in enumerate(BODIES):
        if number in LONG:
            short = await post(app, Connection(), body)
        else:
            short = await post_until_written(app, body)
        long = await post(app, Connection(), body, writes=False)
        assert not long.written
        assert short.texts() == long.texts()
        assert bool(short.written) is (number not in LONG), body
        # Each event once, in its place: the tokens are those of the usage.
        if "stream_options" in body:
            *_, last, _, _ = short.body.split(b"\n\n")
            usage = json.loads(last.removeprefix(b"data: "))["usage"]
            assert usage["completion_tokens"] == TOKENS
    assert {key for _, key in short.texts()} == {"reasoning", "content"}


async def test_a_connection_that_takes_nothing_waits_in_the_long_way(engine: AsyncLLM) -> None:
    app = build_app(engine, FrontEndArgs())
    paused = await post(app, Connection(write_paused=True), {"prompt": "hi"})
    assert not paused.written
    free = await post_until_written(app, {"prompt": "hi"})
    assert free.written and free.texts() == paused.texts()


async def test_nothing_goes_past_the_users_middleware(engine: AsyncLLM) -> None:
    middleware = ["tests.entrypoints.test_middleware.Stamp"]
    app = build_app(engine, FrontEndArgs(middleware=middleware))
    seen = await post(app, Connection(), {"prompt": "hi"})
    assert not seen.written and seen.texts()


async def test_logged_outputs_go_the_long_way(engine: AsyncLLM) -> None:
    args = FrontEndArgs(enable_log_requests=True, enable_log_outputs=True)
    logged = await post(build_app(engine, args), Connection(), {"prompt": "hi"})
    assert not logged.written


async def test_an_error_ends_a_stream_of_written_text(engine: AsyncLLM) -> None:
    app = build_app(engine, FrontEndArgs())
    connection = Connection()
    body = {"prompt": "hi", "max_tokens": 3000}
    reply = asyncio.create_task(post(app, connection, body))
    while len(connection.written) < 5:
        await asyncio.sleep(0.005)
    for stream in engine._handler.streams:
        stream.fail(EngineDeadError("for the test"))
    await reply
    last, done = connection.body.split(b"\n\n")[-3:-1]
    assert b'"error"' in last and done + b"\n\n" == DONE
    num = len(connection.written)
    await asyncio.sleep(0.05)
    assert len(connection.written) == num and not engine.output_processor.request_states
