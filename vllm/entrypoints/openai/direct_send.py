# SPDX-License-Identifier: Apache-2.0
"""A short way for the pieces of a stream, past middleware that only looks at how a reply begins
and that it ends."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_KEY = "vllm.direct_send"


class DirectSend:
    """Outside of the server's own middleware, none of which changes the pieces of a stream, and
    inside of the user's, which may."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, _KEY: send}
        await self.app(scope, receive, send)


def direct_send(scope: Scope, send: Send) -> Send:
    """What sends the pieces between the first and the last; `send` where nothing lies between."""
    direct: Send = scope.get(_KEY, send)
    return direct
