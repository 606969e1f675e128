# SPDX-License-Identifier: Apache-2.0
"""Blocks of all groups: who holds them, and which content the prefix cache can find."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from vllm.v1.core.block_events import BlockEvents
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    Tail,
    make_block_hash_with_group_id,
)
from vllm.v1.core.page_pool import PagePool
from vllm.v1.core.prefix_cache import Prefix
from vllm.v1.kv_cache_interface import ArenaPlan

T = TypeVar("T")

#: evicted entries remembered, so that a later miss can say why
_NUM_REMEMBERED = 65_536


class CacheObserver(Protocol):
    """Follows what the prefix cache can find. Must not change the pool."""

    def cached(self, block: KVCacheBlock, key: BlockHashWithGroupId, tail: Tail | None) -> None:
        """The cache finds `block` under `key`: a full block, which the step being scheduled may
        still have to fill, or a `tail`, whose content is complete once the steps scheduled before
        have run."""

    def evicted(self, block: KVCacheBlock) -> None:
        """The cache is about to forget all that the block holds, and it may be overwritten."""

    def invalidated(self, block: KVCacheBlock) -> None:
        """What the block holds is not what its keys say; `evicted` follows."""


class BlockPool:
    """Reference counts and content hashes over a `PagePool`.

    `null_block` (id 0) stands in block tables where nothing is kept; it is never counted.
    `make_pages`: the pool of pages, whose order of eviction counts.
    """

    def __init__(
        self,
        plan: ArenaPlan,
        make_pages: Callable[[ArenaPlan, Callable[[KVCacheBlock], None]], PagePool] = PagePool,
    ) -> None:
        self.null_block = KVCacheBlock(0, is_null=True)
        self.pages = make_pages(plan, self._forget)
        self._cached: dict[BlockHashWithGroupId, KVCacheBlock] = {}
        #: grows whenever a look-up could find something else than before
        self.version = 0
        #: what the cache could find once, the oldest first; parents for tails
        self._gone: OrderedDict[BlockHashWithGroupId, None] = OrderedDict()
        self._gone_tails: OrderedDict[BlockHashWithGroupId, None] = OrderedDict()
        #: parent -> lengths of the tails that follow it, each with how many there are
        self._lengths: dict[BlockHashWithGroupId, dict[int, int]] = {}
        #: told what the cache gains and loses
        self.events: BlockEvents | None = None
        self.observers: list[CacheObserver] = []

    # ---- taking and giving back ----------------------------------------------------------------

    def can_allocate(
        self,
        demands: Sequence[int],
        hits: Iterable[KVCacheBlock] = (),
        keep_pages: int = 0,
        first_group: int = 0,
    ) -> bool:
        """Whether `demands[g]` blocks for every group `first_group + g` can be had beside holding
        `hits`, with `keep_pages` pages still unpinned afterwards."""
        return self.pages.can_take(self._of_all(demands, first_group, 0), hits, keep_pages)

    def get_new_blocks(
        self,
        demands: Sequence[int],
        near: Sequence[KVCacheBlock | None],
        first_group: int = 0,
    ) -> list[list[KVCacheBlock]]:
        """`demands[g]` blocks for every group `first_group + g`, held once; see `PagePool.take`."""
        taken = self.pages.take(
            self._of_all(demands, first_group, 0), self._of_all(near, first_group, None)
        )
        return taken[first_group : first_group + len(demands)]

    def _of_all(self, given: Sequence[T], first_group: int, nothing: T) -> Sequence[T]:
        """For every group of the pool: what is given for those from `first_group` on."""
        missing = len(self.pages.groups) - len(given)
        if not missing:
            return given
        before, after = [nothing] * first_group, [nothing] * (missing - first_group)
        return [*before, *given, *after]

    def get_new_block(self, near: KVCacheBlock) -> KVCacheBlock | None:
        """One block for who holds `near`, held once; see `PagePool.take_one`."""
        return None if near.is_null else self.pages.take_one(near)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold blocks the cache found."""
        self.pages.touch(block for block in blocks if not block.is_null)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Let go of blocks; those given first are evicted first."""
        self.pages.release(block for block in ordered_blocks if not block.is_null)

    # ---- prefix cache --------------------------------------------------------------------------

    @property
    def num_cached_blocks(self) -> int:
        """Entries the cache can find: full blocks and tails."""
        return len(self._cached)

    def get_cached_block(self, block_hash: BlockHash, group_id: int) -> KVCacheBlock | None:
        """The group's block with this content, live or idle."""
        return self._cached.get(make_block_hash_with_group_id(block_hash, group_id))

    def get_cached_run(
        self, block_hashes: Iterable[BlockHash], group_id: int
    ) -> list[KVCacheBlock]:
        """The group's blocks with these contents, up to the first that it does not have."""
        cached, suffix = self._cached, group_id.to_bytes(4, "big")
        found: list[KVCacheBlock] = []
        for block_hash in block_hashes:
            block = cached.get(BlockHashWithGroupId(block_hash + suffix))
            if block is None:
                break
            found.append(block)
        return found

    def cache_block(self, block: KVCacheBlock, block_hash: BlockHash) -> None:
        """Let the cache find a live block's content, unless another block holds the same."""
        key = make_block_hash_with_group_id(block_hash, block.group_id)
        if block.block_hash is None and key not in self._cached:
            block.block_hash = key
            self._cached[key] = block
            self.version += 1
            for observer in self.observers:
                observer.cached(block, key, None)
            if self.events is not None:
                self.events.stored(block.group_id, block_hash)

    def tail_lengths(self, parent: BlockHash, group_id: int) -> list[int]:
        """Lengths of the tails there are after these full blocks, longest first."""
        lengths = self._lengths.get(make_block_hash_with_group_id(parent, group_id))
        return sorted(lengths, reverse=True) if lengths else []

    def followed_by_tails(self, parents: Sequence[BlockHash], group_id: int) -> Iterator[int]:
        """Indices of the prefixes of full blocks that tails follow, the last one first."""
        lengths, suffix = self._lengths, group_id.to_bytes(4, "big")
        for index in range(len(parents) - 1, -1, -1):
            if parents[index] + suffix in lengths:
                yield index

    def cache_tail(
        self, block: KVCacheBlock, prefix: BlockHash, parent: BlockHash, length: int
    ) -> bool:
        """Let the cache find what the live block holds of a prefix that ends `length` tokens into
        it; False if another block holds the same."""
        group_id = block.group_id
        key = make_block_hash_with_group_id(prefix, group_id)
        if key in self._cached:
            return False
        tail = Tail(key, make_block_hash_with_group_id(parent, group_id), length)
        block.tails += (tail,)
        self._cached[key] = block
        self.version += 1
        lengths = self._lengths.setdefault(tail.parent, {})
        lengths[length] = lengths.get(length, 0) + 1
        for observer in self.observers:
            observer.cached(block, key, tail)
        if self.events is not None:
            self.events.stored_tail(group_id, prefix, parent, length)
        return True

    def uncache_block(self, block: KVCacheBlock) -> None:
        """Make the cache forget a block's content, which is wrong; an idle block becomes free."""
        if not block.is_cached:
            return
        for observer in self.observers:
            observer.invalidated(block)
        self._drop(block)

    def _drop(self, block: KVCacheBlock) -> None:
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

    def reset_prefix_cache(self, held_too: bool = False) -> bool:
        """Forget all content; False, and nothing is forgotten, while any block is live, unless
        `held_too`: who holds a block keeps it, and nobody else finds it."""
        if self.pages.num_live_blocks and not held_too:
            return False
        for block in set(self._cached.values()):
            self._drop(block)
        self._gone.clear()
        self._gone_tails.clear()
        if self.events is not None:
            self.events.cleared()
        return True

    def forget_groups(self, first: int, count: int) -> bool:
        """Forget all content of these groups; False, and nothing is forgotten, while any block of
        theirs is live."""
        groups = range(first, first + count)
        if any(self.pages.groups[group_id].live for group_id in groups):
            return False
        for block in {block for block in self._cached.values() if block.group_id in groups}:
            self._drop(block)
        return True

    def _forget(self, block: KVCacheBlock) -> None:
        self.version += 1
        for observer in self.observers:
            observer.evicted(block)
        if self.events is not None:
            self.events.removed(block)
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            self._remember(self._gone, block.block_hash)
        for tail in block.tails:
            del self._cached[tail.key]
            self._remember(self._gone_tails, tail.parent)
            lengths = self._lengths[tail.parent]
            lengths[tail.length] -= 1
            if not lengths[tail.length]:
                del lengths[tail.length]
                if not lengths:
                    del self._lengths[tail.parent]
        block.reset_hash()

    # ---- what there was ------------------------------------------------------------------------

    def was_cached(self, block_hash: BlockHash, group_id: int) -> bool:
        """Whether the group has this full block, or had it not long ago."""
        key = make_block_hash_with_group_id(block_hash, group_id)
        return key in self._cached or key in self._gone

    def evicted_tail_between(self, prefix: Prefix, start: int, end: int, group_id: int) -> bool:
        """Whether the group once had a tail of this prefix in a block between `start` and `end`
        tokens."""
        size = prefix.hash_block_size
        return any(
            make_block_hash_with_group_id(prefix.prefix_parent(index * size), group_id)
            in self._gone_tails
            for index in range(start // size, end // size + 1)
        )

    @staticmethod
    def _remember(gone: OrderedDict[BlockHashWithGroupId, None], key: BlockHashWithGroupId) -> None:
        gone[key] = None
        gone.move_to_end(key)
        if len(gone) > _NUM_REMEMBERED:
            gone.popitem(last=False)

    # ---- how full ------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Bytes of live blocks over the bytes of all pages but the null page.

        A block counts with its stride, padding included. Idle blocks and the free blocks of
        partly filled pages do not count.
        """
        usable = self.pages.num_pages - 1
        return self.pages.live_pages / usable if usable else 0.0
