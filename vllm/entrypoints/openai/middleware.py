# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware, written against the protocol so that streams and disconnects pass through."""

import hashlib
import secrets
import time
import uuid
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.http_protocol import PieceWriter, take_piece_writer
from vllm.entrypoints.openai.asgi import HttpMiddleware, route_path
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.tally import Tally
from vllm.v1.metrics.prometheus import REGISTRY

_GUARDED = ("/v1", "/v2", "/inference", "/abort_requests", "/placements")
_UNAUTHORIZED = APIError(
    HTTPStatus.UNAUTHORIZED,
    "AuthenticationError",
    "The request needs one of the server's keys in the header `Authorization: Bearer KEY`, or in "
    "`x-api-key`.",
)


class Authentication(HttpMiddleware):
    """Asks for one of the keys on guarded paths; hashes compare in constant time."""

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        super().__init__(app)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        keys = [key] if scheme.lower() == "bearer" else []
        # Anthropic's clients send their key there.
        keys += headers.getlist("x-api-key")
        return any([self._known(key) for key in keys])

    def _known(self, key: str) -> bool:
        digest = hashlib.sha256(key.strip().encode()).digest()
        return any([secrets.compare_digest(digest, known) for known in self._digests])

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        guarded = scope["method"] != "OPTIONS" and any(
            path == top or path.startswith(top + "/") for top in _GUARDED
        )
        if guarded and not self._allowed(Headers(scope=scope)):
            await _UNAUTHORIZED.response({"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self.app(scope, receive, send)


class RequestIdHeader(HttpMiddleware):
    """Echoes the client's X-Request-Id, or the one that the request got."""

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = MutableHeaders(scope=scope)
        request_id = headers.setdefault("x-request-id", uuid.uuid4().hex)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class BodySizeLimit(HttpMiddleware):
    """Answers 413 to a body over the limit, declared or counted while it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        super().__init__(app)
        self.max_bytes = max_bytes

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self.max_bytes:
            await self._refuse(scope, receive, send)
            return
        try:
            await self.app(scope, self._counting(receive), send)
        except _BodyTooLargeError:
            await self._refuse(scope, receive, send)

    def _counting(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self.max_bytes:
                    raise _BodyTooLargeError
            return message

        return counted

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = APIError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "RequestEntityTooLarge",
            f"The request body is larger than {self.max_bytes} bytes (--max-request-body-size).",
        )
        # The rest of the body is unread, so the connection cannot carry another request.
        await error.response({"connection": "close"})(scope, receive, send)


class _BodyTooLargeError(BaseException):
    """Passes the application's own error handling on its way to `BodySizeLimit`."""


class HeadRequests(HttpMiddleware):
    """Answers HEAD as GET without the body, on every route."""

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app({**scope, "method": "GET"}, receive, send_without_body)


class LoadCounter:
    """Counts the POST requests in progress, for `/load`."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    @property
    def running(self) -> int:
        """In all processes that serve."""
        return self._tally.total

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """`app` with its requests counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            self._tally.enter()
            try:
                await app(scope, receive, send)
            finally:
                self._tally.leave()

        return counted


_DIRECT_WAY = "vllm.direct_way"


@dataclass(frozen=True)
class DirectWay:
    """How the pieces between the first and the last get out: `send`, or `writer` where a piece need
    not wait and nobody may want to see it."""

    send: Send
    writer: PieceWriter | None = None


class DirectSend(HttpMiddleware):
    """Outside of the server's own middleware, none of which changes the pieces of a stream, and
    inside of the user's, which may.

    `outermost`: there is none of the user's.
    """

    def __init__(self, app: ASGIApp, outermost: bool) -> None:
        super().__init__(app)
        self._outermost = outermost

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = take_piece_writer(scope)
        scope = {**scope, _DIRECT_WAY: DirectWay(send, writer if self._outermost else None)}
        await self.app(scope, receive, send)


def direct_way(scope: Scope, send: Send) -> DirectWay:
    """The way of a request's pieces; `send` where nothing lies between."""
    way: DirectWay | None = scope.get(_DIRECT_WAY)
    return way or DirectWay(send)


_REQUESTS = Counter(
    "http_requests",
    "HTTP requests by route, method and status.",
    ("handler", "method", "status"),
    registry=REGISTRY,
)
_SECONDS = Histogram(
    "http_request_duration_seconds",
    "From the head of a request to the end of its reply.",
    ("handler", "method"),
    registry=REGISTRY,
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300),
)
#: requests that matched no route: their paths are the clients' invention and unbounded in number
_NO_ROUTE = "none"


class HttpMetrics(HttpMiddleware):
    """Labels: the route's path as written in the code, the method, the status.

    `routes`: paths and methods of the application, by which a request is known that middleware
    answers, as with 401 or 503, before it has found its route.
    """

    def __init__(self, app: ASGIApp, routes: frozenset[tuple[str, str]]) -> None:
        super().__init__(app)
        self._routes = routes

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
        began = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            route = scope.get("route")
            path = route_path(scope) if route is None else route.path
            known = route is not None or (path, scope["method"]) in self._routes
            handler, method = (path, scope["method"]) if known else (_NO_ROUTE, _NO_ROUTE)
            _REQUESTS.labels(handler, method, str(status)).inc()
            _SECONDS.labels(handler, method).observe(time.perf_counter() - began)


_GENERATING = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
    }
)
_RETRY_AFTER_S = 1


class QueueLimit(HttpMiddleware):
    """Answers 503 to a generation request while `max_running + max_queued` are in progress.

    A request counts from its arrival to the end of its reply, before its body is read, so that
    none of the stages in between can pile up work. It counts once, whatever its `n`. `tally`: of
    all processes that serve.
    """

    def __init__(self, app: ASGIApp, max_running: int, max_queued: int, tally: Tally) -> None:
        super().__init__(app)
        self._limit = max_running + max_queued
        self._in_progress = tally

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or route_path(scope) not in _GENERATING:
            await self.app(scope, receive, send)
            return
        if not self._in_progress.try_enter(self._limit):
            await self._refuse(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            self._in_progress.leave()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = APIError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "ServiceUnavailable",
            f"The server is busy: {self._limit} requests are in progress or waiting "
            "(--max-num-seqs of each replica plus --max-queued-requests). Please try again later.",
        )
        # The body is unread, so the connection cannot carry another request.
        headers = {"retry-after": str(_RETRY_AFTER_S), "connection": "close"}
        await error.response(headers)(scope, receive, send)
