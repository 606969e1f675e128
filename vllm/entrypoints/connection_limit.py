# SPDX-License-Identifier: Apache-2.0
"""A bound on open connections (`--max-connections`), so that file descriptors do not run out."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm.entrypoints.openai.errors import ErrorInfo


def limited_protocol(max_connections: int) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, whose connections over the limit answer 503 to everything."""
    refusal = ErrorInfo(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "ServiceUnavailable",
        f"The server has {max_connections} open connections (--max-connections). Please try again "
        "later.",
    ).response({"retry-after": "1", "connection": "close"})

    class LimitedProtocol(HttpToolsProtocol):
        """Counts itself among `connections`, as uvicorn keeps them."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) <= max_connections:
                return
            # Closing at once would often lose the answer: the client's request, unread, makes the
            # system reset the connection. So wait for the request, but not for ever.
            self.app = refusal
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    return LimitedProtocol
