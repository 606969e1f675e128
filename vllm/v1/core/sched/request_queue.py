# SPDX-License-Identifier: Apache-2.0
"""The waiting queue, in order of arrival or of priority."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator

from vllm.v1.request import Request


class RequestQueue(ABC):
    """Requests waiting to run."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request that just arrived."""

    @abstractmethod
    def prepend(self, request: Request) -> None:
        """Put a request back: it keeps its claim to run before those that arrived later."""

    @abstractmethod
    def peek(self) -> Request:
        """The next request; `IndexError` when empty."""

    @abstractmethod
    def pop(self) -> Request:
        """Remove and return the next request; `IndexError` when empty."""

    @abstractmethod
    def remove(self, requests: Iterable[Request]) -> None:
        """Drop these requests; those not queued are ignored."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Requests in the order they would run."""

    def put_back(self, requests: list[Request]) -> None:
        """Return requests taken out in this order, to their former places."""
        for request in reversed(requests):
            self.prepend(request)


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def prepend(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, requests: Iterable[Request]) -> None:
        gone = {id(request) for request in requests}
        self._requests = deque(r for r in self._requests if id(r) not in gone)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityRequestQueue(RequestQueue):
    """Smallest `priority` first, then arrival; a returned request sorts into its place."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def prepend(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def peek(self) -> Request:
        return self._heap[0]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)

    def remove(self, requests: Iterable[Request]) -> None:
        gone = {id(request) for request in requests}
        self._heap = [r for r in self._heap if id(r) not in gone]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))


def create_request_queue(policy: str) -> RequestQueue:
    """The queue for `scheduler_config.policy`: "fcfs" or "priority"."""
    if policy == "fcfs":
        return FCFSRequestQueue()
    if policy == "priority":
        return PriorityRequestQueue()
    raise ValueError(f"unknown scheduling policy {policy!r}; choose 'fcfs' or 'priority'")
