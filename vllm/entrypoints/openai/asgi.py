# SPDX-License-Identifier: Apache-2.0
"""What middleware shares: its form, and the path of a request as the routes see it."""

from abc import ABC, abstractmethod

from starlette.types import ASGIApp, Receive, Scope, Send


class HttpMiddleware(ABC):
    """Middleware that concerns HTTP requests; all else passes through."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.on_http(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    @abstractmethod
    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request, by `app` or without."""


def route_path(scope: Scope) -> str:
    """The request's path below the root path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :]
    return path
