# SPDX-License-Identifier: Apache-2.0
"""The messages: msgspec structs that travel as msgpack arrays, events with their name first.

`group_idx` is the state group, and hashes mean something only together with it: every group keeps
its own blocks of one and the same prefix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec

from vllm.v1.core.kv_cache_utils import ExternalBlockHash

#: the engine's own state memory, on whatever device it runs
MEDIUM_GPU = "GPU"


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one engine step; `ts`: seconds since the epoch."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of all events."""


class BlockStored(KVCacheEvent):
    """Entries of one group that the cache can find from here on, each continuing the one before.

    `token_ids`: `block_size` of them for every hash. `parent_block_hash`: the prefix before the
    first entry, None at the start. `extra_keys`: per entry, what besides the tokens decides its
    content (adapter, media, salt). An entry that ends inside a block, as checkpoints may, is
    told alone, with its own number of tokens as `block_size`.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """Entries of one group that the cache cannot find any more."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """The cache is empty, in every group."""


class KVEventBatch(EventBatch):
    """An `EventBatch` whose events decode to their types."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


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
