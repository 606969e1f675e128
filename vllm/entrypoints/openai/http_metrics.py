# SPDX-License-Identifier: Apache-2.0
"""Counts and times HTTP requests for `/metrics`, by route."""

from __future__ import annotations

import time
from http import HTTPStatus

from prometheus_client import Counter, Histogram
from starlette.types import Message, Receive, Scope, Send

from vllm.entrypoints.openai.asgi import HttpMiddleware
from vllm.v1.metrics.prometheus import REGISTRY

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
    """Labels: the route's path as written in the code, the method, the status."""

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
            handler = _NO_ROUTE if route is None else route.path
            method = scope["method"] if route is not None else _NO_ROUTE
            _REQUESTS.labels(handler, method, str(status)).inc()
            _SECONDS.labels(handler, method).observe(time.perf_counter() - began)
