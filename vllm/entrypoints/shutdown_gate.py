# SPDX-License-Identifier: Apache-2.0
"""Refusing new requests while the running ones finish."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.errors import ErrorInfo

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_REFUSAL = ErrorInfo(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "ServiceUnavailable",
    "The server is shutting down and takes no new requests.",
)


class ShutdownGate:
    """Open, it counts the requests in `app`; closed, it answers 503 to every new one, probes of
    health among them, so that balancers send the rest elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._closed = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        """From now on refuse."""
        self._closed = True

    async def drained(self, timeout_s: float) -> None:
        """Wait until no request runs, or for `timeout_s`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._closed:
            # The body is unread, so the connection cannot carry another request.
            await _REFUSAL.response({"connection": "close"})(scope, receive, send)
            return
        self._num_running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
