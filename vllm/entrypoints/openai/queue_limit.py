# SPDX-License-Identifier: Apache-2.0
"""Refusing work that would only wait (`--max-queued-requests`)."""

from __future__ import annotations

from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.openai.asgi import HttpMiddleware, route_path
from vllm.entrypoints.openai.errors import ErrorInfo
from vllm.entrypoints.tally import OwnTally, Tally

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

    def __init__(
        self, app: ASGIApp, max_running: int, max_queued: int, tally: Tally | None = None
    ) -> None:
        super().__init__(app)
        self._limit = max_running + max_queued
        self._in_progress = tally or OwnTally()

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
        info = ErrorInfo(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "ServiceUnavailable",
            f"The server is busy: {self._limit} requests are in progress or waiting "
            "(--max-num-seqs plus --max-queued-requests). Please try again later.",
        )
        # The body is unread, so the connection cannot carry another request.
        headers = {"retry-after": str(_RETRY_AFTER_S), "connection": "close"}
        await info.response(headers)(scope, receive, send)
