# SPDX-License-Identifier: Apache-2.0
"""A server around the fake engine, reached through ASGI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio

from tests.entrypoints.fake_engine import FakeAsyncLLM
from tests.entrypoints.server_events import official_clients
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs

if TYPE_CHECKING:
    import openai

MakeClient = Callable[..., httpx.AsyncClient]
MakeApi = Callable[..., "openai.AsyncOpenAI"]


@pytest.fixture
def engine() -> FakeAsyncLLM:
    return FakeAsyncLLM()


@pytest_asyncio.fixture
async def make_client(engine: FakeAsyncLLM) -> AsyncIterator[MakeClient]:
    """Makes clients of servers with the given `FrontEndArgs`."""
    clients = []

    def make(**args: Any) -> httpx.AsyncClient:
        app = build_app(engine, FrontEndArgs(**args))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://server"))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest_asyncio.fixture
async def make_api(engine: FakeAsyncLLM) -> AsyncIterator[MakeApi]:
    """Makes official clients of servers with the given `FrontEndArgs`."""
    import openai

    async with official_clients(openai.AsyncOpenAI, "http://server/v1", engine) as make:
        yield make


@pytest.fixture
def client(make_client: MakeClient) -> httpx.AsyncClient:
    """A client of a server with default arguments."""
    return make_client()


def events(reply: httpx.Response) -> list[Any]:
    """The JSON of each server-sent event; checks the framing and the closing `[DONE]`."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
