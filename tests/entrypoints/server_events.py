# SPDX-License-Identifier: Apache-2.0
"""Reads named server-sent events, and makes SDK clients of an application in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.entrypoints.fake_engine import FakeAsyncLLM
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs

try:
    import httpx2 as sdk_http  # what newer releases of the clients build on
except ImportError:
    import httpx as sdk_http  # type: ignore[no-redef]

Events = list[dict[str, Any]]


def named_events(reply: httpx.Response) -> Events:
    """The payloads; each event must be named by the `type` of its payload."""
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    *blocks, rest = reply.text.split("\n\n")
    assert rest == ""
    payloads = []
    for block in blocks:
        name, data = block.split("\n")
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + payloads[-1]["type"]
    return payloads


def in_process(engine: FakeAsyncLLM, **args: Any) -> Any:
    """The HTTP client that an SDK needs to reach a server with these `FrontEndArgs`."""
    app = build_app(engine, FrontEndArgs(**args))  # type: ignore[arg-type]
    return sdk_http.AsyncClient(transport=sdk_http.ASGITransport(app=app), base_url="http://server")


@asynccontextmanager
async def official_clients(
    kind: Callable[..., Any], base_url: str, engine: FakeAsyncLLM
) -> AsyncIterator[Callable[..., Any]]:
    """Makes SDK clients of the class `kind`, each of a server with the given `FrontEndArgs`; they
    are closed at the end."""
    clients: list[Any] = []

    def make(sent_key: str = "k", **args: Any) -> Any:
        http_client = in_process(engine, **args)
        clients.append(
            kind(api_key=sent_key, base_url=base_url, http_client=http_client, max_retries=0)
        )
        return clients[-1]

    yield make
    for client in clients:
        await client.close()
