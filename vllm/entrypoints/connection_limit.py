# SPDX-License-Identifier: Apache-2.0
"""A bound on open connections (`--max-connections`), so that file descriptors do not run out."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from vllm.entrypoints.http_protocol import StreamingProtocol
from vllm.entrypoints.openai.errors import ErrorInfo
from vllm.entrypoints.tally import Tally


def limited_protocol(max_connections: int, tally: Tally) -> type[StreamingProtocol]:
    """The server's protocol, whose connections over the limit answer 503 to everything; `tally`:
    the open ones of all processes that serve."""
    refusal = ErrorInfo(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "ServiceUnavailable",
        f"The server has {max_connections} open connections (--max-connections). Please try again "
        "later.",
    ).response({"retry-after": "1", "connection": "close"})

    class LimitedProtocol(StreamingProtocol):
        """Counts itself, while it is one too many as well."""

        def connection_lost(self, exc: Exception | None) -> None:
            tally.leave()
            super().connection_lost(exc)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if tally.try_enter(max_connections):
                return
            tally.enter()
            # Closing at once would often lose the answer: the client's request, unread, makes the
            # system reset the connection. So wait for the request, but not for ever.
            self.app = refusal
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    return LimitedProtocol
