# SPDX-License-Identifier: Apache-2.0
"""Bounded queues, request timeouts and the end of a server: clear answers, nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import resource
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient, events
from tests.entrypoints.fake_engine import MAX_MODEL_LEN, FakeAsyncLLM
from tests.entrypoints.server_events import named_events
from tests.entrypoints.test_disconnect import Visit, until
from vllm.entrypoints.launcher import raise_open_file_limit
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.entrypoints.openai.request_limits import RequestLimits
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

pytestmark = pytest.mark.asyncio

HI = [{"role": "user", "content": "hi"}]
BODIES = [
    ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 4}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 4}),
]
#: longer than any machine takes
TIMEOUT_S = 600.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_connections": 0}, "--max-connections"),
        ({"max_queued_requests": -1}, "--max-queued-requests"),
        ({"request_timeout": 0.0}, "--request-timeout"),
        ({"request_limits": {"nonsense": 1}}, "unknown limit 'nonsense'; known: sequences"),
        ({"request_limits": {"stop": 0}}, "--request-limits: stop must be"),
        ({"request_limits": {"stop": "many"}}, "--request-limits"),
    ],
)
async def test_bad_limits_are_named(fields: dict[str, float], words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        FrontEndArgs(**fields)


async def test_a_limit_can_be_raised_and_lowered(make_client: MakeClient) -> None:
    client = make_client(request_limits={"stop": 2, "sequences": 300, "chars_per_token": 1})
    for status, fields in (
        (200, {"stop": ["a", "b"]}),
        (400, {"stop": ["a", "b", "c"]}),
        (200, {"prompt": ["a"] * 300}),
        (400, {"prompt": ["a"] * 301}),
        (400, {"prompt": "a" * (MAX_MODEL_LEN + 1), "truncate_prompt_tokens": 8}),
        (200, {"prompt": "a" * 500, "truncate_prompt_tokens": 8}),
    ):
        body = {"prompt": "hi", "max_tokens": 1, **fields}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == status, (fields, reply.text)


async def test_the_docs_list_every_limit() -> None:
    table = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    for field in dataclasses.fields(RequestLimits):
        value = f"{field.default:,}"
        assert re.search(rf"^\|[^|]*`{field.name}`[^|]*\| {value} \|", table, re.M), field.name


async def test_a_full_queue_answers_503_with_retry_after(
    make_client: MakeClient, engine: FakeAsyncLLM
) -> None:
    """Two run (the fake engine's max_num_seqs), one waits, the fourth is refused."""
    client = make_client(max_queued_requests=1)
    engine.hang_after = 0
    body = {"prompt": "hi", "max_tokens": 4}
    waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
    await until(lambda: len(engine.running) == 3)
    for path, other in BODIES:
        reply = await client.post(path, json=other)
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        busy = "overloaded_error" if path == "/v1/messages" else "ServiceUnavailable"
        assert reply.json()["error"]["type"] == busy
        assert "--max-queued-requests" in reply.json()["error"]["message"]
    for path in ("/health", "/v1/models", "/metrics"):
        assert (await client.get(path)).status_code == 200
    assert (await client.post("/tokenize", json={"prompt": "hi"})).status_code == 200
    assert len(engine.calls) == 3
    waiting.pop().cancel()
    await until(lambda: len(engine.running) == 2)
    waiting.append(asyncio.create_task(client.post("/v1/completions", json=body)))
    await until(lambda: len(engine.running) == 3)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_every_replica_may_be_full(make_client: MakeClient, engine: FakeAsyncLLM) -> None:
    """Two run on each of three replicas, none waits."""
    engine.vllm_config.parallel_config.local_ranks = range(3)
    client = make_client(max_queued_requests=0)
    engine.hang_after = 0
    body = {"prompt": "hi", "max_tokens": 4}
    waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(6)]
    await until(lambda: len(engine.running) == 6)
    assert (await client.post("/v1/completions", json=body)).status_code == 503
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_refused_and_failed_requests_give_their_place_back(
    make_client: MakeClient, engine: FakeAsyncLLM
) -> None:
    client = make_client(max_queued_requests=0)
    for _ in range(5):
        assert (await client.post("/v1/completions", json={})).status_code == 400
    engine.fail_after = 0
    for _ in range(5):
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 500


async def post_in_vain(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, path: str, **request: Any
) -> httpx.Response:
    """The reply when `TIMEOUT_S` have passed since the engine has begun to hang."""
    num_hung, now = engine.num_hung, time.monotonic
    reply = asyncio.create_task(client.post(path, **request))
    await until(lambda: engine.num_hung > num_hung)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now() + TIMEOUT_S)
        return await reply


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_timeout_before_the_first_byte(
    make_client: MakeClient, engine: FakeAsyncLLM, path: str, body: dict
) -> None:
    client = make_client(request_timeout=TIMEOUT_S)
    engine.hang_after = 0
    for stream in (False, True):
        reply = await post_in_vain(client, engine, path, json={**body, "stream": stream})
        assert reply.status_code == 504
        assert "--request-timeout" in reply.json()["error"]["message"]
    assert not engine.running and len(engine.aborted) == 2


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_timeout_in_a_stream_is_an_error_event(
    make_client: MakeClient, engine: FakeAsyncLLM, path: str, body: dict
) -> None:
    client = make_client(request_timeout=TIMEOUT_S)
    engine.hang_after = 2
    reply = await post_in_vain(client, engine, path, json={**body, "stream": True})
    named = path in ("/v1/responses", "/v1/messages")
    chunks = named_events(reply) if named else events(reply)
    assert reply.status_code == 200 and len(chunks) > 2
    if path == "/v1/responses":
        assert chunks[-1]["type"] == "response.failed"
        assert chunks[-2]["type"] == "error" and chunks[-2]["code"] == "TimeoutError"
    elif path == "/v1/messages":
        assert chunks[-1]["error"]["type"] == "timeout_error"
    else:
        last = chunks[-1]["error"]
        assert last["code"] == 504 and last["type"] == "TimeoutError"
    assert not engine.running and len(engine.aborted) == 1


async def test_timeout_covers_a_body_that_never_comes(make_client: MakeClient) -> None:
    client = make_client(request_timeout=0.2)

    async def stuck():
        yield b'{"prompt":'
        await asyncio.Event().wait()

    headers = {"content-type": "application/json"}
    reply = await client.post("/v1/completions", content=stuck(), headers=headers)
    assert reply.status_code == 504


async def test_fast_requests_do_not_time_out(make_client: MakeClient) -> None:
    client = make_client(request_timeout=TIMEOUT_S)
    for path, body in BODIES:
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("hang_after", [0, 2])
async def test_end_of_the_server_is_told(engine: FakeAsyncLLM, hang_after: int) -> None:
    """uvicorn cancels the tasks of requests that outlast the shutdown timeout."""
    engine.hang_after = hang_after
    body = {"prompt": "hi", "max_tokens": 4, "stream": True}
    visit = Visit(engine, "/v1/completions", body)
    await until(lambda: engine.running and len(visit.sent) >= hang_after)
    visit.task.cancel()
    await asyncio.wait_for(visit.task, 60)
    assert visit.sent[0]["status"] == (200 if hang_after else 503)
    assert b"shutting down" in visit.sent[-1]["body"] and not visit.sent[-1].get("more_body")
    assert not engine.running and len(engine.aborted) == 1


async def test_log_lines_carry_the_request_id(
    make_client: MakeClient, engine: FakeAsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(enable_log_requests=True, request_timeout=TIMEOUT_S)
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        headers = {"X-Request-Id": "mine"}
        engine.hang_after = 0
        request = {"json": {"prompt": "hi"}, "headers": headers}
        await post_in_vain(client, engine, "/v1/completions", **request)
        engine.hang_after, engine.fail_after = None, 0
        await client.post("/v1/completions", **request)
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    for words in ("received cmpl-mine-0", "aborted cmpl-mine-0", "request cmpl-mine-0 failed"):
        assert words in caplog.text


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (EngineGenerateError("request r failed: lost"), "request r failed: lost"),
        (EngineDeadError("x"), "request cmpl-mine-0 failed: the engine core is dead: x"),
    ],
)
async def test_the_log_names_a_failed_request_once(
    client: httpx.AsyncClient,
    engine: FakeAsyncLLM,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    line: str,
) -> None:
    engine.fail_after, engine.error = 0, error
    await client.post("/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": "mine"})
    assert [record.message for record in caplog.records if "failed" in record.message] == [line]


async def test_http_client_sees_whole_streams(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 4, "stream": True}
    assert len(events(await client.post("/v1/completions", json=body))) == 4


async def test_the_open_file_limit_is_lifted_as_far_as_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = before[1] if before[1] != resource.RLIM_INFINITY else 65536
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), before[1]))
    try:
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(65536, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
