# SPDX-License-Identifier: Apache-2.0
"""Prefixes kept from eviction for a time after their request ended."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = init_logger(__name__)

#: part of the arena that pins may hold together
MAX_PINNED = 0.5


class PinnedPrefixes:
    """Holds blocks until their time is over, memory is needed for a request, or the cache is
    reset. Pins beyond `MAX_PINNED` of the arena are refused with a warning."""

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        #: (end, number, blocks, pages' worth), the next to end first
        self._pins: list[tuple[float, int, list[KVCacheBlock], float]] = []
        self._num_made = 0
        self._pages = 0.0

    def pin(self, blocks: Iterable[KVCacheBlock], seconds: float) -> bool:
        """Hold these blocks, all of them or none."""
        kept = [block for block in blocks if not block.is_null]
        groups = self._pool.pages.groups
        pages = sum(1 / groups[block.group_id].capacity for block in kept)
        limit = MAX_PINNED * (self._pool.pages.num_pages - 1)
        if self._pages + pages > limit:
            logger.warning(
                "a prefix is not pinned: %.1f pages beside %.1f pinned ones are more than %.0f %% "
                "of the state arena",
                pages,
                self._pages,
                100 * MAX_PINNED,
            )
            return False
        self._pool.touch(kept)
        self._pages += pages
        self._num_made += 1
        heapq.heappush(self._pins, (self._clock() + seconds, self._num_made, kept, pages))
        return True

    def expire(self) -> None:
        """Let go of what is over."""
        while self._pins and self._pins[0][0] <= self._clock():
            self.release_next()

    def release_next(self) -> bool:
        """Let go of the pin that would end first; False if there is none."""
        if not self._pins:
            return False
        _, _, blocks, pages = heapq.heappop(self._pins)
        self._pages -= pages
        self._pool.free_blocks(reversed(blocks))
        return True
