# SPDX-License-Identifier: Apache-2.0
"""From an HTTP request to a serving object and back."""

import asyncio
import codecs
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from vllm.entrypoints.openai.errors import APIError, describe, error_response
from vllm.entrypoints.openai.protocol.base import RequestModel
from vllm.entrypoints.openai.serving_engine import RequestContext
from vllm.entrypoints.openai.state import server_of
from vllm.entrypoints.openai.streaming import (
    ClientGoneError,
    Deadline,
    EventSource,
    EventStream,
    shutting_down,
    until_disconnect,
)

Body = TypeVar("Body", bound=RequestModel)
Document = BaseModel | msgspec.Struct | Sequence[BaseModel]
Reply = bytes | Document | AsyncGenerator[bytes, None] | EventSource

#: bodies above this many bytes are parsed in a thread
_LARGE = 32 * 1024
#: the client closed the connection; nobody sees this status but the access log
_CLIENT_CLOSED_REQUEST = 499
_RANK_HEADER = "X-data-parallel-rank"
_RANK = re.compile("[0-9]{1,9}")
_TRACE_HEADERS = ("traceparent", "tracestate")


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI description of a JSON body that `model` parses."""
    schema = model.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """`schema` with every reference to its own definitions replaced by the definition: in the
    OpenAPI document such references would look for them elsewhere."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    if name in definitions:
        return _inlined(definitions[name], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


async def parse_body(request: Request, model: type[Body]) -> Body:
    """The validated body; raises `APIError`."""
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise APIError(
            HTTPStatus.BAD_REQUEST,
            "Bad Request",
            f"Unsupported content type {content_type!r}; only application/json is supported.",
        )
    data = await request.body()
    if len(data) > _LARGE:
        return await server_of(request).renderer.run(_parse, model, data, size=len(data))
    return _parse(model, data)


def _parse(model: type[Body], data: bytes) -> Body:
    """As `parse_body`, in any thread: a body may hold more mistakes than the loop has time for."""
    try:
        # Editors of Windows begin files with the mark, which parsers may ignore (RFC 8259, 8.1).
        return model.model_validate_json(data.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        described = describe(error)
    raise described


def context_of(request: Request) -> RequestContext:
    """Headers that matter to the engine; raises `APIError` for one that makes no sense."""
    trace = {name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers}
    rank = _replica(request.headers.get(_RANK_HEADER))
    return RequestContext(request.headers.get("x-request-id"), trace or None, rank)


def _replica(header: str | None) -> int | None:
    if header is None:
        return None
    if _RANK.fullmatch(header) is None:
        message = f"{_RANK_HEADER} must be the rank of a replica, got {header[:40]!r}"
        raise APIError(HTTPStatus.BAD_REQUEST, "Bad Request", message, _RANK_HEADER)
    return int(header)


async def respond(
    request: Request,
    model: type[Body],
    handler: Callable[[Body, RequestContext], Awaitable[Reply]],
) -> Response:
    """Parse, handle until done or the client leaves, and answer as JSON or as events."""

    deadline = Deadline(server_of(request).request_timeout_s)

    async def work() -> Response:
        body = await parse_body(request, model)
        reply = await handler(body, context_of(request))
        if isinstance(reply, AsyncGenerator):
            reply = EventSource(reply)
        if isinstance(reply, EventSource):
            return EventStream(await anext(reply.chunks), reply, deadline)
        return Response(_as_json(reply), media_type="application/json")

    try:
        await asyncio.wait_for(request.body(), deadline.remaining_s())
        return await until_disconnect(request, work(), deadline)
    except asyncio.TimeoutError:
        return error_response(request, deadline.error())
    except asyncio.CancelledError:
        return error_response(request, shutting_down())
    except (ClientGoneError, ClientDisconnect):
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    except Exception as error:
        return error_response(request, error)


def _as_json(reply: bytes | Document) -> bytes:
    if isinstance(reply, bytes):
        return reply
    if isinstance(reply, msgspec.Struct):
        return msgspec.json.encode(reply)
    if isinstance(reply, BaseModel):
        return reply.model_dump_json().encode()
    return b"[" + b",".join(item.model_dump_json().encode() for item in reply) + b"]"
