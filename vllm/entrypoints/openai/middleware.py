# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware, written against the protocol so that streams and disconnects pass through."""

import hashlib
import secrets
import uuid
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.asgi import HttpMiddleware, route_path
from vllm.entrypoints.openai.errors import ErrorInfo
from vllm.entrypoints.tally import OwnTally, Tally

_GUARDED = ("/v1", "/v2", "/inference", "/abort_requests", "/placements")
_UNAUTHORIZED = ErrorInfo(
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
        info = ErrorInfo(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "RequestEntityTooLarge",
            f"The request body is larger than {self.max_bytes} bytes (--max-request-body-size).",
        )
        # The rest of the body is unread, so the connection cannot carry another request.
        await info.response({"connection": "close"})(scope, receive, send)


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

    def __init__(self, tally: Tally | None = None) -> None:
        self._tally = tally or OwnTally()

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
