# SPDX-License-Identifier: Apache-2.0
"""What a tier gives up first: the interface, and least recently used first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.page_pool import PagePool
from vllm.v1.kv_cache_interface import ArenaPlan


class EvictionPolicy(Protocol):
    """Told what happens to a tier's contents; its pool of pages evicts in its order."""

    def make_pages(self, plan: ArenaPlan, on_evict: Callable[[KVCacheBlock], None]) -> PagePool:
        """Called once, before anything else."""

    def wanted(self, key: BlockHashWithGroupId) -> None:
        """A block is about to be taken for this content, which the tier does not have."""

    def stored(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> None:
        """A block of the tier holds the content now."""

    def used(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> None:
        """A request, or a store, found the content here."""

    def evicted(self, key: BlockHashWithGroupId) -> None:
        """The content left for others."""

    def discarded(self, key: BlockHashWithGroupId) -> None:
        """The content was wrong."""

    def reset(self) -> None:
        """All content is gone, and what is known of earlier content is of no use."""


class Lru:
    """What was used longest ago goes first: the order of the pool itself."""

    def make_pages(self, plan: ArenaPlan, on_evict: Callable[[KVCacheBlock], None]) -> PagePool:
        return PagePool(plan, on_evict)

    def wanted(self, key: BlockHashWithGroupId) -> None:
        return

    def stored(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> None:
        return

    def used(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> None:
        return

    def evicted(self, key: BlockHashWithGroupId) -> None:
        return

    def discarded(self, key: BlockHashWithGroupId) -> None:
        return

    def reset(self) -> None:
        return
