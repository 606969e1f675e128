# SPDX-License-Identifier: Apache-2.0
"""The proxy's routes."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.compression import CompressedBodies
from vllm.entrypoints.openai.errors import APIError, install_handlers
from vllm.entrypoints.openai.middleware import BodySizeLimit, HeadRequests
from vllm.entrypoints.proxy.args import ProxyArgs
from vllm.entrypoints.proxy.two_phases import (
    Answer,
    AnswerBroken,
    Body,
    Instances,
    NobodyThere,
    TwoPhases,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")

_FORWARDED_HEADERS = ("authorization", "x-api-key")
_RETURNED_HEADERS = ("content-type", "retry-after", "www-authenticate", "x-request-id")
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
#: what nginx calls a request whose client has left
_CLIENT_LEFT = 499


def build_app(args: ProxyArgs, transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """`transport`: what carries requests to the servers, for tests."""
    prefill = Instances("prefill", args.prefill)
    decode = Instances("decode", args.decode)
    # As many connections as there are requests; each server limits its own. A connection that is
    # kept may be closed by the server as a request is sent, which would look like its death.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    http = httpx.AsyncClient(transport=transport, limits=limits, trust_env=False)
    phases = TwoPhases(http, prefill, decode, args.prefill_timeout)

    async def look() -> None:
        await asyncio.gather(*(kind.look(http, args.health_timeout) for kind in (prefill, decode)))

    async def watch() -> None:
        while True:
            await asyncio.sleep(args.health_interval)
            await look()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await look()
        watcher = asyncio.create_task(watch())
        yield
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
        await http.aclose()

    app = FastAPI(
        title="vllm proxy", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.log_error_stack = False
    install_handlers(app)
    # Once as decompressed, and once as it arrives.
    app.add_middleware(BodySizeLimit, max_bytes=args.max_request_body_size)
    app.add_middleware(CompressedBodies)
    app.add_middleware(BodySizeLimit, max_bytes=args.max_request_body_size)
    app.add_middleware(HeadRequests)

    @app.get("/health")
    async def health() -> Response:
        """200 while requests can be answered; which servers are well."""
        shown = {
            kind.kind: [
                {"url": one.url, "healthy": one.healthy, "running": one.running} for one in kind.all
            ]
            for kind in (prefill, decode)
        }
        return JSONResponse(shown, 200 if decode.next() is not None else 503)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        instance = decode.next()
        if instance is None:
            return _error(503, "no decode server can be reached")
        try:
            reply = await http.get(f"{instance.url}/v1/models", headers=_headers(request))
        except httpx.HTTPError as error:
            decode.report(instance, repr(error))
            return _error(502, f"the decode server does not answer: {error!r}")
        return _passed_on(reply)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=dict[str, Any])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return _error(400, f"the body is not a JSON object: {error}")
        return await _answer(phases, request, body)

    @app.api_route("/{path:path}", methods=_METHODS)
    async def unknown(request: Request) -> Response:
        return _error(
            404,
            f"the proxy has no {request.method} {request.url.path}, only POST /v1/completions and "
            "/v1/chat/completions, GET /v1/models and /health; send other requests to a server "
            "for answers",
        )

    return app


class _Relay(StreamingResponse):
    """Hands a reply on; lets go of it whether or not the client stays to the end. One that breaks
    off does so for the client, too: its connection ends before the reply does."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.chunks(), answer.status, headers=_kept(answer.headers))
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except AnswerBroken as error:
            logger.warning("%s", error)
        finally:
            await self._answer.close()


async def _answer(phases: TwoPhases, request: Request, body: Body) -> Response:
    try:
        answer = await _unless_client_leaves(
            request, phases.answer(request.url.path, body, _headers(request))
        )
    except NobodyThere as error:
        return _error(503, str(error))
    if answer is None:
        return Response(status_code=_CLIENT_LEFT)
    if isinstance(answer, Answer):
        return _Relay(answer)
    return _passed_on(answer)


async def _unless_client_leaves(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`, which is cancelled when the client leaves; then None."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leaves(request))
    await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        leaving.cancel()
        return working.result()
    working.cancel()
    with suppress(asyncio.CancelledError):
        return await working  # it may have ended meanwhile
    return None


async def _leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _headers(request: Request) -> dict[str, str]:
    """Both engines know a request by one id. Bytes go on as they come, so they must be plain."""
    headers = {k: request.headers[k] for k in _FORWARDED_HEADERS if k in request.headers}
    headers["accept-encoding"] = "identity"
    headers["x-request-id"] = request.headers.get("x-request-id") or uuid.uuid4().hex
    return headers


def _passed_on(reply: httpx.Response) -> Response:
    return Response(reply.content, reply.status_code, headers=_kept(reply.headers))


def _kept(headers: httpx.Headers) -> dict[str, str]:
    """Of a server's reply, what is meant for the client."""
    return {"content-type": "application/json"} | {
        name: headers[name] for name in _RETURNED_HEADERS if name in headers
    }


def _error(status: int, message: str) -> Response:
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    return APIError(status, kinds.get(status, "ServiceUnavailableError"), message).response()
