# SPDX-License-Identifier: Apache-2.0
"""Events that several workers report about one thing: it happened when all of them say so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import msgspec

from vllm.distributed.kv_events.messages import KVCacheEvent


class KVEventAggregator:
    """Counts equal events of `num_workers` workers. Raises `ValueError` for no worker."""

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        self._num_workers = num_workers
        #: encoded event -> the event, and how many workers reported it
        self._counts: dict[bytes, tuple[KVCacheEvent, int]] = {}

    def add_events(self, events: Iterable[KVCacheEvent]) -> None:
        """Add one worker's events; its own repetitions count once."""
        for key, event in {msgspec.msgpack.encode(event): event for event in events}.items():
            first, count = self._counts.get(key, (event, 0))
            self._counts[key] = first, count + 1

    def get_common_events(self) -> list[KVCacheEvent]:
        """Events that every worker reported, in the order they were first seen."""
        return [event for event, n in self._counts.values() if n >= self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """Events that any worker reported, once each."""
        return [event for event, _ in self._counts.values()]

    def clear_events(self) -> None:
        self._counts.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect `count` more workers."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Expect one worker: what is left was agreed on."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        return self._num_workers


class KVConnectorKVEvents(ABC):
    """A connector's events on their way from its workers to its scheduler side."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None: ...

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Keep what all workers agree on; returns itself."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None: ...

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]: ...

    @abstractmethod
    def get_number_of_workers(self) -> int: ...

    @abstractmethod
    def clear_events(self) -> None: ...
