# SPDX-License-Identifier: Apache-2.0
"""The waiting queue, in order of arrival or of priority."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from vllm.v1.request import Request


class RequestQueue:
    """Requests waiting to run, in the order in which they will: first come, first served, or
    `by_priority` (`Request.__lt__`), where a returned request sorts into its place."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Queue a request that just arrived."""
        if self._by_priority:
            insort(self._requests, request)
        else:
            self._requests.append(request)

    def prepend(self, request: Request) -> None:
        """Put a request back: it keeps its claim to run before those that arrived later."""
        if self._by_priority:
            insort(self._requests, request)
        else:
            self._requests.appendleft(request)

    def put_back(self, requests: list[Request]) -> None:
        """Return requests taken out in this order, to their former places."""
        for request in reversed(requests):
            self.prepend(request)

    def peek(self) -> Request:
        """The next request; `IndexError` when empty."""
        return self._requests[0]

    def pop(self) -> Request:
        """Remove and return the next request; `IndexError` when empty."""
        return self._requests.popleft()

    def remove(self, requests: Iterable[Request]) -> None:
        """Drop these requests; those not queued are ignored."""
        gone = {id(request) for request in requests}
        self._requests = deque(r for r in self._requests if id(r) not in gone)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
