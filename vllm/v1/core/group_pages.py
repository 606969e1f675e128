# SPDX-License-Identifier: Apache-2.0
"""Pages that are lent to a group, found by what can be had from them."""

from __future__ import annotations

from collections import OrderedDict

from vllm.v1.core.idle_queue import IdleQueue
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class PageBuckets:
    """Pages with free blocks, found by how few are left."""

    __slots__ = ("_by_free", "_occupied")

    def __init__(self) -> None:
        self._by_free: dict[int, OrderedDict[Page, None]] = {}
        self._occupied = 0

    def add(self, page: Page, num_free: int) -> None:
        bucket = self._by_free.get(num_free)
        if bucket is None:
            bucket = self._by_free[num_free] = OrderedDict()
        bucket[page] = None
        self._occupied |= 1 << num_free

    def remove(self, page: Page, num_free: int) -> None:
        bucket = self._by_free[num_free]
        del bucket[page]
        if not bucket:
            self._occupied ^= 1 << num_free

    def fullest(self) -> Page | None:
        """A page with the fewest free blocks (at least one)."""
        if not self._occupied:
            return None
        lowest = (self._occupied & -self._occupied).bit_length() - 1
        return next(iter(self._by_free[lowest]))


class GroupPages:
    """A group's pages by what can be had from them.

    `supply`: free and idle blocks of its pinned pages, to be had without another page.
    """

    __slots__ = ("group_id", "capacity", "pinned", "resting", "with_idle", "idle", "supply", "live")

    def __init__(self, group_id: int, capacity: int, idle: IdleQueue[KVCacheBlock]) -> None:
        self.group_id = group_id
        self.capacity = capacity
        self.pinned: PageBuckets = PageBuckets()
        self.resting: PageBuckets = PageBuckets()
        self.with_idle: OrderedDict[Page, None] = OrderedDict()
        self.idle = idle
        self.supply = 0
        self.live = 0

    def place(self, page: Page) -> None:
        """Bring the indexes up to date with the counts of a page of this group."""
        live, idle = page.live, page.idle
        num_free = self.capacity - live - idle
        bucket: PageBuckets | None = None
        if num_free and live:
            bucket = self.pinned
        elif num_free and idle:
            bucket = self.resting
        if live and idle:
            self.with_idle[page] = None
        else:
            self.with_idle.pop(page, None)
        supply = num_free + idle if live else 0
        self.supply += supply - page.supply
        page.supply = supply
        if bucket is not page.bucket or num_free != page.bucket_free:
            if page.bucket is not None:
                page.bucket.remove(page, page.bucket_free)
            if bucket is not None:
                bucket.add(page, num_free)
            page.bucket, page.bucket_free = bucket, num_free


class Page:
    """A page lent to a group.

    `blocks[i]`: its i-th block; they are made in order, as they are first needed. `spare`: those
    of them that are free. `rank`: the highest rank a block of it was left idle with.
    """

    __slots__ = (
        "index",
        "group",
        "blocks",
        "spare",
        "live",
        "idle",
        "rank",
        "is_idle",
        "supply",
        "bucket",
        "bucket_free",
    )

    def __init__(self, index: int, group: GroupPages) -> None:
        self.index = index
        self.group = group
        self.blocks: list[KVCacheBlock] = []
        self.spare: list[KVCacheBlock] = []
        self.live = 0
        self.idle = 0
        self.rank = (0.0, 0)
        self.is_idle = False
        self.supply = 0
        self.bucket: PageBuckets | None = None
        self.bucket_free = 0
