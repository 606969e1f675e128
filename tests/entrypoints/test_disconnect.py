# SPDX-License-Identifier: Apache-2.0
"""A client that leaves aborts its requests, whatever stage they are in."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.entrypoints.fake_engine import FakeAsyncLLM
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs

pytestmark = pytest.mark.asyncio


class Visit:
    """One ASGI call whose client can hang up."""

    def __init__(self, engine: FakeAsyncLLM, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("server", 80),
        }
        app = build_app(engine, FrontEndArgs())  # type: ignore[arg-type]
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(self.task, 60)


async def until(condition: Any) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never held")


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "num_requests"),
    [
        ("/v1/completions", {"prompt": "hi"}, 1),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
        ("/v1/chat/completions", {"messages": HI}, 1),
    ],
)
@pytest.mark.parametrize("hang_after", [0, 2])
async def test_leaving_aborts(
    engine: FakeAsyncLLM,
    path: str,
    body: dict[str, Any],
    num_requests: int,
    streaming: bool,
    hang_after: int,
) -> None:
    engine.hang_after = hang_after if streaming else 0
    visit = Visit(engine, path, {**body, "max_tokens": 5, "stream": streaming})
    await until(lambda: len(engine.running) == num_requests)
    if streaming and hang_after:
        await until(lambda: len(visit.sent) > hang_after)
    await visit.leave()
    assert not engine.running
    assert len(engine.aborted) == num_requests


async def test_finished_requests_are_not_aborted(engine: FakeAsyncLLM) -> None:
    visit = Visit(engine, "/v1/completions", {"prompt": "hi", "max_tokens": 2, "stream": True})
    await asyncio.wait_for(visit.task, 60)
    assert visit.sent[-1]["more_body"] is False
    assert not engine.aborted and not engine.running


async def test_one_failing_prompt_aborts_the_others(engine: FakeAsyncLLM) -> None:
    engine.fail_after = 1
    visit = Visit(
        engine, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "stream": True}
    )
    await asyncio.wait_for(visit.task, 60)
    assert not engine.running and len(engine.aborted) == 2
