# SPDX-License-Identifier: Apache-2.0
"""What a tier gives up first: what was used longest ago, or what ARC says."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.group_pages import Page
from vllm.v1.core.idle_queue import IdleQueue
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    Tail,
    get_group_id,
)
from vllm.v1.core.page_pool import PagePool
from vllm.v1.kv_cache_interface import ArenaPlan


class EvictionPolicy:
    """A tier's order of eviction: what was used longest ago goes first, as in any pool of pages.
    A subclass has another order, for which it follows what the tier holds."""

    def make_pages(self, plan: ArenaPlan, on_evict: Callable[[KVCacheBlock], None]) -> PagePool:
        """The tier's pages, which evict in this order. Called once, before anything else."""
        return PagePool(plan, on_evict)

    def wanted(self, key: BlockHashWithGroupId) -> None:
        """A block is about to be taken for this content, which the tier does not have."""

    def used(self, block: KVCacheBlock) -> None:
        """A request, or a store, found the block's content here."""

    def reset(self) -> None:
        """All content is gone, and what is known of earlier content is of no use."""

    # ---- `CacheObserver` of the tier -----------------------------------------------------------

    def cached(self, block: KVCacheBlock, key: BlockHashWithGroupId, tail: Tail | None) -> None:
        return

    def evicted(self, block: KVCacheBlock) -> None:
        return

    def invalidated(self, block: KVCacheBlock) -> None:
        return


def content_of(block: KVCacheBlock) -> tuple[BlockHashWithGroupId, Tail | None]:
    """The name of what a tier's block holds, and the tail it is, if it is none of a full block."""
    tail = block.tails[0] if block.tails else None
    key = block.block_hash if tail is None else tail.key
    assert key is not None
    return key, tail


#: `KVCacheBlock.credit`, and so the first part of its rank, says which list it is in
_T1, _T2 = 0.0, 1.0


class _List:
    """Names in the order of their last use, the oldest first, and their bytes."""

    __slots__ = ("names", "num_bytes")

    def __init__(self) -> None:
        self.names: OrderedDict[BlockHashWithGroupId, int] = OrderedDict()
        self.num_bytes = 0

    def add(self, key: BlockHashWithGroupId, size: int) -> None:
        self.names[key] = size
        self.num_bytes += size

    def remove(self, key: BlockHashWithGroupId) -> bool:
        size = self.names.pop(key, None)
        if size is not None:
            self.num_bytes -= size
        return size is not None

    def drop_oldest(self) -> None:
        _, size = self.names.popitem(last=False)
        self.num_bytes -= size


class Arc(EvictionPolicy):
    """Adaptive replacement cache (N. Megiddo, D. S. Modha: ARC: A Self-Tuning, Low Overhead
    Replacement Cache, FAST 2003), over blocks of several sizes.

    Lists have the paper's names: T1 holds what was used once, T2 what was used again, B1 and B2 the
    names of what left them, p the share of the memory meant for T1. A use of a name in B1 says that
    T1 was too small and raises p, one in B2 lowers it. Lengths are bytes, where the paper's are
    pages: with blocks of one size it is the paper's algorithm. A block in use cannot leave; the
    next one of its list does. Remembers as many bytes' worth of names as the tier has.
    """

    def __init__(self) -> None:
        self.t1, self.t2, self.b1, self.b2 = _List(), _List(), _List(), _List()
        #: bytes meant for T1
        self.p = 0.0
        self._capacity = 0
        self._sizes: list[int] = []
        self._wanted_in_b2 = False

    def make_pages(self, plan: ArenaPlan, on_evict: Callable[[KVCacheBlock], None]) -> PagePool:
        self._sizes = [plan.block_stride(group) for group in range(len(plan.groups))]
        self._capacity = (plan.num_pages - 1) * plan.page_bytes
        return _ArcPages(plan, on_evict, self)

    @property
    def list_to_shorten(self) -> float:
        """REPLACE of the paper: which list has to give up something."""
        length = self.t1.num_bytes
        too_long = length >= self.p if self._wanted_in_b2 else length > self.p
        return _T1 if length and too_long else _T2

    def wanted(self, key: BlockHashWithGroupId) -> None:
        size, b1, b2 = self._sizes[get_group_id(key)], self.b1, self.b2
        self._wanted_in_b2 = key in b2.names
        if key in b1.names:
            self.p = min(self._capacity, self.p + max(b2.num_bytes / b1.num_bytes, 1.0) * size)
        elif self._wanted_in_b2:
            self.p = max(0.0, self.p - max(b1.num_bytes / b2.num_bytes, 1.0) * size)

    def cached(self, block: KVCacheBlock, key: BlockHashWithGroupId, tail: Tail | None) -> None:
        known = self.b1.remove(key) or self.b2.remove(key)
        (self.t2 if known else self.t1).add(key, self._sizes[block.group_id])
        block.credit = _T2 if known else _T1
        self._forget_oldest()

    def used(self, block: KVCacheBlock) -> None:
        key, _ = content_of(block)
        if self.t1.remove(key) or self.t2.remove(key):
            self.t2.add(key, self._sizes[block.group_id])
            block.credit = _T2

    def evicted(self, block: KVCacheBlock) -> None:
        key, _ = content_of(block)
        for held, gone in ((self.t1, self.b1), (self.t2, self.b2)):
            if held.remove(key):
                gone.add(key, self._sizes[block.group_id])
        self._forget_oldest()

    def invalidated(self, block: KVCacheBlock) -> None:
        for each in (self.t1, self.t2, self.b1, self.b2):
            each.remove(content_of(block)[0])

    def reset(self) -> None:
        for each in (self.t1, self.t2, self.b1, self.b2):
            each.names.clear()
            each.num_bytes = 0
        self.p, self._wanted_in_b2 = 0.0, False

    def _forget_oldest(self) -> None:
        """T1 and B1 hold what fits in the memory at most, all four twice as much."""
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        while b1.names and t1.num_bytes + b1.num_bytes > self._capacity:
            b1.drop_oldest()
        seen_once = t1.num_bytes + b1.num_bytes
        while b2.names and seen_once + t2.num_bytes + b2.num_bytes > 2 * self._capacity:
            b2.drop_oldest()


class _ArcQueue(IdleQueue[Any]):
    """Idle blocks, or pages of them, by list; a page with a block of T2 counts as one of T2."""

    __slots__ = ("_arc", "_by_list")

    def __init__(self, arc: Arc) -> None:
        super().__init__()
        self._arc = arc
        self._by_list: dict[float, IdleQueue[Any]] = {_T1: IdleQueue(), _T2: IdleQueue()}

    def __len__(self) -> int:
        return sum(map(len, self._by_list.values()))

    def __iter__(self) -> Iterator[Any]:
        for queue in self._by_list.values():
            yield from queue

    def __contains__(self, item: object) -> bool:
        return any(item in queue for queue in self._by_list.values())

    def add(self, item: Any) -> None:
        self._by_list[item.rank[0]].add(item)

    def remove(self, item: Any) -> None:
        self._by_list[item.rank[0]].remove(item)

    def first(self) -> Any | None:
        shorten = self._arc.list_to_shorten
        found = self._by_list[shorten].first()
        return self._by_list[_T2 - shorten].first() if found is None else found


class _ArcPages(PagePool):
    """Evicts from the list that has to be shortened, the oldest first."""

    def __init__(self, plan: ArenaPlan, on_evict: Callable[[KVCacheBlock], None], arc: Arc) -> None:
        self._arc = arc
        super().__init__(plan, on_evict)

    def _begin_rest(self, page: Page) -> None:
        """What left the page counts no more."""
        idle = [b.rank for b in page.blocks if b.is_cached and not b.ref_cnt]
        page.rank = max(idle, default=(_T1, 0))

    def _make_queue(self) -> _ArcQueue:
        return _ArcQueue(self._arc)

    def _leaves_before(self, page: Page, block: KVCacheBlock) -> bool:
        if page.rank[0] != block.rank[0]:
            return page.rank[0] == self._arc.list_to_shorten
        return page.rank < block.rank

    def _raise_floor(self, rank: tuple[float, int]) -> None:
        """Ranks are lists and ages, which nothing is added to."""
