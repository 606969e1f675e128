# SPDX-License-Identifier: Apache-2.0
"""A short way for the pieces of a stream, past middleware that only looks at how a reply begins
and that it ends."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.http_protocol import PieceWriter, take_piece_writer
from vllm.entrypoints.openai.asgi import HttpMiddleware

_KEY = "vllm.direct_way"


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
        scope = {**scope, _KEY: DirectWay(send, writer if self._outermost else None)}
        await self.app(scope, receive, send)


def direct_way(scope: Scope, send: Send) -> DirectWay:
    """The way of a request's pieces; `send` where nothing lies between."""
    way: DirectWay | None = scope.get(_KEY)
    return way or DirectWay(send)
