# SPDX-License-Identifier: Apache-2.0
"""Two-level allocation: pages of the arena are lent to groups, blocks of pages to requests.

A block is *free*, *live* (a request holds it) or *idle* (no request, but the prefix cache can find
it). A page belongs to a group while any of its blocks is live or idle. It is *pinned* while one is
live, else it is an *idle page*, which any group may take after evicting what it caches.

Idle blocks leave in the order of their rank: the rank of what was evicted last when they became
idle, plus their credit (GreedyDual: with equal credits, least recently used first). The order in
which a group takes blocks, and why it cannot fail while a page is evictable, are in
docs/state_memory.md. Everything is O(1) amortised, but O(log idle) for becoming idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.block_journal import BlockJournal
from vllm.v1.core.group_pages import GroupPages, Page
from vllm.v1.core.idle_queue import IdleQueue
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import ArenaPlan


class PagePool:
    """Lends the pages of one arena; page 0, the null page, is never lent.

    `on_evict(block)` is called with an idle block that is about to lose its content; it must
    clear the block's hash.
    """

    def __init__(self, plan: ArenaPlan, on_evict: Callable[[KVCacheBlock], None]) -> None:
        self.groups = [
            GroupPages(i, g.blocks_per_page, self._make_queue()) for i, g in enumerate(plan.groups)
        ]
        self.num_pages = plan.num_pages
        #: told which blocks are taken and become free
        self.journal: BlockJournal | None = None
        self._on_evict = on_evict
        self._pages: list[Page | None] = [None] * plan.num_pages
        self._returned: list[int] = []
        self._first_unused = 1
        self._idle_pages: IdleQueue[Page] = self._make_queue()
        self._clock = 0
        self._floor = 0.0

    # ---- the order of eviction -----------------------------------------------------------------

    def _make_queue(self) -> IdleQueue[Any]:
        return IdleQueue()

    def _leaves_before(self, page: Page, block: KVCacheBlock) -> bool:
        """Whether the first idle page leaves before a group's first idle block."""
        return page.rank < block.rank

    def _raise_floor(self, rank: tuple[float, int]) -> None:
        """Something of this rank leaves."""
        self._floor = max(self._floor, rank[0])

    # ---- what there is -------------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        return self.num_pages - self._first_unused + len(self._returned)

    @property
    def num_unpinned_pages(self) -> int:
        """Pages any group can have: free ones and idle ones."""
        return self.num_free_pages + len(self._idle_pages)

    @property
    def num_live_blocks(self) -> int:
        return sum(group.live for group in self.groups)

    @property
    def live_pages(self) -> float:
        """Live blocks of all groups, in pages' worth of bytes."""
        return sum(group.live / group.capacity for group in self.groups)

    def set_groups(self, first: int, capacities: Sequence[int]) -> None:
        """Groups from `first` on hold so many blocks per page: in the place of others, of which
        nothing is live or idle, or behind all."""
        for group_id, capacity in enumerate(capacities, first):
            made = GroupPages(group_id, capacity, self._make_queue())
            if group_id == len(self.groups):
                self.groups.append(made)
                continue
            old = self.groups[group_id]
            if old.live or len(old.idle):
                raise RuntimeError(f"group {group_id} still has blocks")
            self.groups[group_id] = made
            if self.journal is not None:
                self.journal.forget_groups([group_id])

    def find_block(self, group_id: int, block_id: int) -> KVCacheBlock | None:
        """The block if its page belongs to the group and it has ever been used there."""
        group = self.groups[group_id]
        index, offset = divmod(block_id, group.capacity)
        page = self._pages[index] if index < self.num_pages else None
        if page is None or page.group is not group:
            return None
        return page.blocks[offset] if offset < len(page.blocks) else None

    def can_take(
        self, demands: Sequence[int], hits: Iterable[KVCacheBlock] = (), keep_pages: int = 0
    ) -> bool:
        """Whether `take(demands)` succeeds after `hits` were touched, leaving `keep_pages`
        unpinned. `demands[g]`: blocks for group `g`. Exact: False only if it is impossible."""
        supply = [group.supply for group in self.groups]
        unpinned = self.num_unpinned_pages
        woken: set[int] = set()
        for block in hits:
            if block.ref_cnt or block.is_null:
                continue
            page = self._page_of(block)
            if page.live == 0 and page.index not in woken:
                woken.add(page.index)
                unpinned -= 1
                supply[block.group_id] += page.group.capacity
            supply[block.group_id] -= 1
        return self._pages_needed(demands, supply) + keep_pages <= unpinned

    def _pages_needed(self, demands: Sequence[int], supply: Sequence[int]) -> int:
        pages = 0
        for group, demand, have in zip(self.groups, demands, supply, strict=True):
            if demand > have:
                pages -= (have - demand) // group.capacity
        return pages

    # ---- taking blocks -------------------------------------------------------------------------

    def take(
        self, demands: Sequence[int], near: Sequence[KVCacheBlock | None]
    ) -> list[list[KVCacheBlock]]:
        """`demands[g]` live blocks for every group `g`, all or nothing.

        `near[g]`: a live block whose page is tried first. Raises `RuntimeError` if `can_take` is
        false; nothing has changed then.
        """
        if not self.can_take(demands):
            raise RuntimeError(f"the arena cannot give {list(demands)} blocks")
        missing = list(demands)
        taken: list[list[KVCacheBlock]] = []
        for group, neighbour in zip(self.groups, near, strict=True):
            blocks: list[KVCacheBlock] = []
            g = group.group_id
            if missing[g] and neighbour is not None and not neighbour.is_null:
                page = self._page_of(neighbour)
                if page.live + page.idle < group.capacity:
                    blocks = self._take_free(page, missing[g])
                    missing[g] -= len(blocks)
            while missing[g]:
                more = self._take_some(group, missing)
                missing[g] -= len(more)
                blocks += more
            taken.append(blocks)
        return taken

    def take_one(self, near: KVCacheBlock) -> KVCacheBlock | None:
        """One live block for the group of `near`, a live one, whose page is tried first: what
        `take` gives, without asking all groups. None if there is none to be had."""
        page = self._page_of(near)
        group = page.group
        if page.live + page.idle < group.capacity:
            return self._take_free(page, 1)[0]
        if not group.supply and not self.num_unpinned_pages:
            return None
        missing = [0] * len(self.groups)
        missing[group.group_id] = 1
        return self._take_some(group, missing)[0]

    def _take_some(self, group: GroupPages, missing: list[int]) -> list[KVCacheBlock]:
        """At least one of the blocks missing to `group`, from the best source there is."""
        count = missing[group.group_id]
        page = group.pinned.fullest()
        if page is not None:
            return self._take_free(page, count)
        may_pin = self._may_pin(group, missing)
        page = group.resting.fullest()
        if page is not None and may_pin:
            return self._take_free(page, count)
        if may_pin and self.num_free_pages:
            return self._take_free(self._lend(group), count)
        return self._evict_and_take(group, count, may_pin)

    def _may_pin(self, group: GroupPages, missing: list[int]) -> bool:
        """Whether every group's missing blocks can still be had if `group` pins one more page."""
        left = self.num_unpinned_pages - 1
        if left >= sum(missing):
            return True
        supply = [g.supply for g in self.groups]
        supply[group.group_id] += group.capacity
        return self._pages_needed(missing, supply) <= left

    def _evict_and_take(self, group: GroupPages, count: int, may_pin: bool) -> list[KVCacheBlock]:
        block = group.idle.first()
        page = self._idle_pages.first()
        if may_pin and page is not None and (block is None or self._leaves_before(page, block)):
            self._raise_floor(page.rank)
            self._evict_page(page)
            return self._take_free(self._lend(group), count)
        if block is not None:
            own = self._page_of(block)
            if own.live or may_pin:
                self._raise_floor(block.rank)
                self._evict(block, own)
                return self._take_free(own, 1)
        # The oldest block lies in an idle page another group is about to need.
        crowded = next(iter(group.with_idle))
        idle = [b for b in crowded.blocks if b.ref_cnt == 0 and b.is_cached]
        for b in idle[:count]:
            self._evict(b, crowded)
        return self._take_free(crowded, count)

    def _take_free(self, page: Page, count: int) -> list[KVCacheBlock]:
        """Up to `count` free blocks of the page, made live; those used before come first."""
        group = page.group
        count = min(count, group.capacity - page.live - page.idle)
        spare = page.spare
        reused = min(count, len(spare))
        blocks = [spare.pop() for _ in range(reused)]
        first = page.index * group.capacity + len(page.blocks)
        for block_id in range(first, first + count - reused):
            block = KVCacheBlock(block_id, group.group_id, page.index)
            page.blocks.append(block)
            blocks.append(block)
        for block in blocks:
            block.ref_cnt = 1
        if self.journal is not None:
            self.journal.taken(blocks)
        page.live += count
        group.live += count
        self._place(page)
        return blocks

    # ---- a block's life ------------------------------------------------------------------------

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more request holds each of the blocks."""
        changed: dict[Page, None] = {}
        for block in blocks:
            block.ref_cnt += 1
            if block.ref_cnt == 1:
                page = self._page_of(block)
                group = page.group
                group.idle.remove(block)
                page.idle -= 1
                page.live += 1
                group.live += 1
                changed[page] = None
        for page in changed:
            self._place(page)

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One request less holds each of the blocks; the last one leaves it idle if hashed, else
        free. Those given first are evicted first."""
        changed: dict[Page, None] = {}
        for block in blocks:
            if block.ref_cnt <= 0:
                raise RuntimeError(f"{block} is released but nobody holds it")
            if block.ref_cnt > 1:
                block.ref_cnt -= 1
                continue
            page = self._page_of(block)
            group = page.group
            if page.live == 1:
                self._begin_rest(page)
            block.ref_cnt = 0
            page.live -= 1
            group.live -= 1
            if block.block_hash is None and not block.tails:
                page.spare.append(block)
                if self.journal is not None:
                    self.journal.freed(block)
            else:
                self._rank(block, page)
                group.idle.add(block)
                page.idle += 1
            changed[page] = None
        for page in changed:
            self._place(page)

    def _begin_rest(self, page: Page) -> None:
        """The page's only live block is about to be released."""

    def refresh(self, blocks: Iterable[KVCacheBlock]) -> None:
        """These were used: of idle blocks they are evicted last, in this order. As if each were
        held and released, but a page is moved once."""
        moved: dict[Page, None] = {}
        for block in blocks:
            if block.ref_cnt:
                continue
            page = self._page_of(block)
            if page.is_idle and page not in moved:
                self._idle_pages.remove(page)
                moved[page] = None
            page.group.idle.remove(block)
            self._rank(block, page)
            page.group.idle.add(block)
        for page in moved:
            self._idle_pages.add(page)

    def _rank(self, block: KVCacheBlock, page: Page) -> None:
        self._clock += 1
        block.rank = (self._floor + block.credit, self._clock)
        page.rank = max(page.rank, block.rank)

    def evict(self, block: KVCacheBlock) -> None:
        """Make an idle block free."""
        page = self._page_of(block)
        self._evict(block, page)
        self._place(page)

    def _evict(self, block: KVCacheBlock, page: Page) -> None:
        """As `evict`, without placing the page: the caller takes from it next."""
        self._on_evict(block)
        page.group.idle.remove(block)
        page.idle -= 1
        page.spare.append(block)
        if self.journal is not None:
            self.journal.freed(block)

    def _evict_page(self, page: Page) -> None:
        for block in page.blocks:
            if block.is_cached:
                self._evict(block, page)
        self._place(page)

    # ---- a page's life -------------------------------------------------------------------------

    def _page_of(self, block: KVCacheBlock) -> Page:
        page = self._pages[block.page]
        assert page is not None
        return page

    def _lend(self, group: GroupPages) -> Page:
        if self._returned:
            index = self._returned.pop()
        else:
            index = self._first_unused
            self._first_unused += 1
        page = Page(index, group)
        self._pages[index] = page
        return page

    def _place(self, page: Page) -> None:
        """Bring the indexes up to date with the page's counts; an empty page goes back."""
        page.group.place(page)
        is_idle = page.live == 0 and page.idle > 0
        if is_idle != page.is_idle:
            page.is_idle = is_idle
            if is_idle:
                self._idle_pages.add(page)
            else:
                self._idle_pages.remove(page)
        if not page.live and not page.idle:
            self._pages[page.index] = None
            self._returned.append(page.index)
