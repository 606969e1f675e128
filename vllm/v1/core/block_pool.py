# SPDX-License-Identifier: Apache-2.0
"""Blocks of all groups: who holds them, and which content the prefix cache can find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.core.page_pool import PagePool
from vllm.v1.kv_cache_interface import ArenaPlan


class BlockPool:
    """Reference counts and content hashes over a `PagePool`.

    `null_block` (id 0) stands in block tables where nothing is kept; it is never counted.
    """

    def __init__(self, plan: ArenaPlan) -> None:
        self.null_block = KVCacheBlock(0, is_null=True)
        self.pages = PagePool(plan, self._forget)
        self._cached: dict[BlockHashWithGroupId, KVCacheBlock] = {}

    # ---- taking and giving back ----------------------------------------------------------------

    def can_allocate(
        self, demands: Sequence[int], hits: Iterable[KVCacheBlock] = (), keep_pages: int = 0
    ) -> bool:
        """Whether `demands[g]` blocks for every group `g` can be had beside holding `hits`, with
        `keep_pages` pages still unpinned afterwards."""
        return self.pages.can_take(demands, hits, keep_pages)

    def get_new_blocks(
        self, demands: Sequence[int], near: Sequence[KVCacheBlock | None]
    ) -> list[list[KVCacheBlock]]:
        """`demands[g]` blocks for every group, held once; see `PagePool.take`."""
        return self.pages.take(demands, near)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold blocks the cache found."""
        for block in blocks:
            if not block.is_null:
                self.pages.touch(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Let go of blocks; those given first are evicted first."""
        for block in ordered_blocks:
            if not block.is_null:
                self.pages.release(block)

    # ---- prefix cache --------------------------------------------------------------------------

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def get_cached_block(self, block_hash: BlockHash, group_id: int) -> KVCacheBlock | None:
        """The group's block with this content, live or idle."""
        return self._cached.get(make_block_hash_with_group_id(block_hash, group_id))

    def cache_block(self, block: KVCacheBlock, block_hash: BlockHash) -> None:
        """Let the cache find a live block's content, unless another block holds the same."""
        key = make_block_hash_with_group_id(block_hash, block.group_id)
        if block.block_hash is None and key not in self._cached:
            block.block_hash = key
            self._cached[key] = block

    def uncache_block(self, block: KVCacheBlock) -> None:
        """Make the cache forget a block's content; an idle block becomes free."""
        if block.block_hash is None:
            return
        if block.ref_cnt:
            self._forget(block)
        else:
            self.pages.evict(block)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the content of these blocks in every group (ids are per group, and a caller may
        not know which one it means)."""
        for block_id in block_ids:
            for group in self.pages.groups:
                block = self.pages.find_block(group.group_id, block_id)
                if block is not None:
                    self.uncache_block(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing is forgotten, while any block is live."""
        if self.pages.num_live_blocks:
            return False
        self.pages.evict_idle_pages()
        return True

    def _forget(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        del self._cached[block.block_hash]
        block.reset_hash()

    # ---- how full ------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Bytes of live blocks over the bytes of all pages but the null page.

        A block counts with its stride, padding included. Idle blocks and the free blocks of
        partly filled pages do not count.
        """
        usable = self.pages.num_pages - 1
        return self.pages.live_pages / usable if usable else 0.0
