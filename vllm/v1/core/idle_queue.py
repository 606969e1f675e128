# SPDX-License-Identifier: Apache-2.0
"""What the page pool may evict, by rank."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class _Ranked(Protocol):
    rank: tuple[float, int]


_Item = TypeVar("_Item", bound=_Ranked)


class IdleQueue(Generic[_Item]):
    """Items by rank, the lowest first, of equal ranks the one queued first; an item's rank must not
    change while it is queued."""

    __slots__ = ("_heap", "_num_added", "_queued")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, _Item]] = []
        self._num_added = 0
        self._queued: dict[_Item, int] = {}

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[_Item]:
        return iter(self._queued)

    def __contains__(self, item: object) -> bool:
        return item in self._queued

    def add(self, item: _Item) -> None:
        # Removed items stay in the heap until they surface or are half of it.
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [entry for entry in self._heap if self._queued.get(entry[2]) == entry[1]]
            heapify(self._heap)
        number = self._num_added = self._num_added + 1
        self._queued[item] = number
        heappush(self._heap, (item.rank, number, item))

    def remove(self, item: _Item) -> None:
        del self._queued[item]

    def first(self) -> _Item | None:
        heap = self._heap
        while heap:
            _, number, item = heap[0]
            if self._queued.get(item) == number:
                return item
            heappop(heap)
        return None
