# SPDX-License-Identifier: Apache-2.0
"""OpenAI batch files: one request per line in, one answer per line out.

The lines go through the server's own application, so they are checked and answered as over HTTP.
"""

from __future__ import annotations

import asyncio
import codecs
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TextIO

import httpx
import msgspec
from fastapi import FastAPI
from tqdm import tqdm

from vllm.entrypoints.openai.errors import APIError

#: where a line may go: the routes of the batch API that generate text
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@dataclass(frozen=True)
class BatchCounts:
    """Lines answered, and how many of them with an error."""

    lines: int
    errors: int


class BadLineError(ValueError):
    """A line that is no batch request; `custom_id` as far as it could be read."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @classmethod
    def parse(cls, line: bytes) -> BatchRequest:
        """Raises `BadLineError` that says what is wrong."""
        try:
            given = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise BadLineError(f"not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise BadLineError("expected a JSON object")
        custom_id, url, body = given.get("custom_id"), given.get("url"), given.get("body")
        if not isinstance(custom_id, str):
            raise BadLineError("custom_id: expected a string")
        if given.get("method", "POST") != "POST":
            raise BadLineError(f"method: expected POST, got {given['method']!r}", custom_id)
        if url not in URLS:
            raise BadLineError(f"url: expected one of {', '.join(URLS)}, got {url!r}", custom_id)
        if not isinstance(body, dict):
            raise BadLineError("body: expected a JSON object", custom_id)
        if body.get("stream"):
            raise BadLineError("body.stream: the answers of a batch are not streamed", custom_id)
        return cls(custom_id, url, body)


async def run_batch(
    app: FastAPI, lines: Iterable[bytes], output: TextIO, max_in_flight: int, total: int
) -> BatchCounts:
    """Answer every line, in order; a line that fails gets an error and stops nothing.

    `max_in_flight` bounds the requests the engine holds, `total` is for the progress bar.
    """
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    pending: deque[asyncio.Task[dict[str, Any]]] = deque()
    num_lines = num_errors = 0
    with tqdm(total=total, desc="Answering", unit="req", dynamic_ncols=True) as bar:
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://batch",
            timeout=None,
            headers={"accept-encoding": "identity"},
        ) as client:

            async def answer(line: bytes) -> dict[str, Any]:
                answered = await _answer(client, line)
                bar.update()
                return answered

            async def write_first() -> None:
                nonlocal num_lines, num_errors
                first = await pending.popleft()
                output.write(msgspec.json.encode(first).decode() + "\n")
                num_lines += 1
                num_errors += first["error"] is not None

            for line in lines:
                if len(pending) == max_in_flight:
                    await write_first()
                pending.append(asyncio.create_task(answer(line)))
            while pending:
                await write_first()
    return BatchCounts(num_lines, num_errors)


async def _answer(client: httpx.AsyncClient, line: bytes) -> dict[str, Any]:
    """The output line: `response` always has a status; `error` repeats the error object."""
    try:
        request = BatchRequest.parse(line)
    except BadLineError as error:
        refusal = APIError(HTTPStatus.BAD_REQUEST, "BadRequestError", str(error))
        return _output_line(error.custom_id, refusal.status, refusal.body())
    reply = await client.post(request.url, json=request.body)
    return _output_line(request.custom_id, reply.status_code, reply.json())


def _output_line(custom_id: str | None, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"vllm-{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": {
            "status_code": int(status),
            "request_id": f"vllm-batch-{uuid.uuid4().hex}",
            "body": body,
        },
        "error": body["error"] if status >= HTTPStatus.BAD_REQUEST else None,
    }


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines that are not empty, without the byte order mark of a file."""
    with path.open("rb") as file:
        for line in file:
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield line
