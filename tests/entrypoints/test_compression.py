# SPDX-License-Identifier: Apache-2.0
"""gzip in both directions, and what hostile bodies cost."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient, events
from tests.entrypoints.fake_engine import FakeAsyncLLM, byte_ids
from vllm.entrypoints.openai import compression

pytestmark = pytest.mark.asyncio

ZIPPED = {"content-encoding": "gzip", "content-type": "application/json"}


async def send(client: httpx.AsyncClient, body: bytes, **headers: str) -> httpx.Response:
    return await client.post("/v1/completions", content=body, headers={**ZIPPED, **headers})


def error_of(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    return str(reply.json()["error"]["message"])


async def test_compressed_bodies(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
    half = len(body) // 2
    several = gzip.compress(body[:half]) + gzip.compress(body[half:])
    for sent in (gzip.compress(body), several):
        assert (await send(client, sent)).status_code == 200
    assert (await send(client, body, **{"content-encoding": "identity"})).status_code == 200
    assert [call.prompt["prompt_token_ids"] for call in engine.calls] == [byte_ids("hi")] * 3


async def test_a_compressed_body_in_pieces(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    prompt = list(range(200))
    body = gzip.compress(json.dumps({"prompt": prompt, "max_tokens": 1}).encode())

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 7):
            yield body[start : start + 7]

    reply = await client.post("/v1/completions", content=pieces(), headers=ZIPPED)
    assert reply.status_code == 200
    assert engine.calls[0].prompt["prompt_token_ids"] == prompt


async def test_bodies_that_are_no_gzip(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    good = gzip.compress(b'{"prompt": "hi"}')
    for body in (b"", b'{"prompt": "hi"}', good[:-4], good[:12] + b"\xff" + good[13:], good + b"x"):
        assert "not valid gzip" in error_of(await send(client, body), 400)
    reply = await send(client, b"x", **{"content-encoding": "br"})
    assert "'br' is not supported" in error_of(reply, 415)
    assert reply.headers["accept-encoding"] == "gzip" and not engine.calls


async def test_a_decompression_bomb_is_cut_off(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB in 64 KiB: no more than the limit and one piece is ever decompressed."""
    limit = 2**20
    client = make_client(max_request_body_size=limit)
    sizes = []
    next_piece = compression._Unzip._next_piece

    def watched(self: compression._Unzip) -> bytes:
        sizes.append(len(piece := next_piece(self)))
        return piece

    monkeypatch.setattr(compression._Unzip, "_next_piece", watched)
    bomb = gzip.compress(bytes(64 * 2**20))
    assert len(bomb) < limit
    assert "--max-request-body-size" in error_of(await send(client, bomb), 413)
    assert max(sizes) <= compression._PIECE and sum(sizes) <= limit + compression._PIECE
    # Many empty members are a long body that decompresses to nothing.
    assert error_of(await send(client, gzip.compress(b"") * (limit // 20 + 1)), 413)


async def test_replies_are_compressed_for_who_accepts_it(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "hi", "max_tokens": 300, "return_token_ids": True}

    async def reply(accept: str) -> httpx.Response:
        return await client.post("/v1/completions", json=body, headers={"accept-encoding": accept})

    plain = await reply("identity")
    assert "content-encoding" not in plain.headers
    for large in (2**20, 100):  # in the event loop, in a thread
        monkeypatch.setattr(compression, "_LARGE", large)
        zipped = await reply("br;q=1.0, gzip;q=0.5")
        assert zipped.headers["content-encoding"] == "gzip"
        assert "Accept-Encoding" in zipped.headers["vary"]
        assert int(zipped.headers["content-length"]) < len(plain.content)
        assert zipped.json()["choices"] == plain.json()["choices"]
    for accept in ("gzip;q=0", "deflate", ""):
        assert "content-encoding" not in (await reply(accept)).headers
    small = await client.get("/version", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in small.headers


async def test_streams_are_not_compressed(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 300, "stream": True}
    reply = await client.post("/v1/completions", json=body, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in reply.headers and len(events(reply)) == 300
