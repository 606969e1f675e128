# SPDX-License-Identifier: Apache-2.0
"""The server's end of an HTTP connection, with a short way for the pieces of a reply."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.tally import Tally

#: where the ASGI scope of a request has its `PieceWriter`
_KEY = "vllm.piece_writer"


class PieceWriter:
    """Writes pieces of one reply without a task: between its head and its end, while the
    connection is open and takes data."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def is_ready(self) -> bool:
        """Whether a piece may be written now; else send it and wait as long as that takes."""
        cycle = self._cycle
        return (
            not self._flow.write_paused
            and cycle.chunked_encoding is True
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, piece: bytes) -> None:
        """Write a piece that is not empty, where `is_ready`."""
        self._write(b"%x\r\n%b\r\n" % (len(piece), piece))


class StreamingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose requests bring their `PieceWriter`."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # The request's task, which has the same scope, begins later.
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope[_KEY] = PieceWriter(self.cycle)  # type: ignore[literal-required]


def take_piece_writer(scope: Scope) -> PieceWriter | None:
    """What writes pieces of the reply; None where another server has the connection.

    The scope has it no longer: they would keep each other alive.
    """
    return scope.pop(_KEY, None)


def limited_protocol(max_connections: int, tally: Tally) -> type[StreamingProtocol]:
    """The server's protocol, whose connections over the limit answer 503 to everything; `tally`:
    the open ones of all processes that serve."""
    refusal = APIError(
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
