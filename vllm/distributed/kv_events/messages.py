# SPDX-License-Identifier: Apache-2.0
"""The messages: msgspec structs that travel as msgpack arrays, events with their name first.

`group_idx` is the state group, and hashes mean something only together with it: every group keeps
its own blocks of one and the same prefix.
"""

from __future__ import annotations

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
