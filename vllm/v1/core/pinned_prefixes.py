# SPDX-License-Identifier: Apache-2.0
"""Prefixes kept from eviction for a time after their request ended."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = init_logger(__name__)

#: part of the arena that pins may hold together
MAX_PINNED = 0.5


class PinnedPrefixes:
    """Holds blocks until their time is over, memory is needed for a request, or the cache is
    reset. Pins beyond `MAX_PINNED` of the arena are refused with a warning; a block that several
    pins hold counts once."""

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        #: (end, number, blocks), the next to end first
        self._pins: list[tuple[float, int, list[KVCacheBlock]]] = []
        self._num_made = 0
        #: pins that hold each block
        self._holders: Counter[KVCacheBlock] = Counter()
        #: by group
        self._num_blocks: Counter[int] = Counter()

    @property
    def pages(self) -> float:
        """Pinned blocks of all groups, in pages' worth of bytes."""
        return self._pages_of(self._num_blocks)

    def _pages_of(self, num_blocks: Counter[int]) -> float:
        groups = self._pool.pages.groups
        return sum(n / groups[group_id].capacity for group_id, n in num_blocks.items())

    def pin(self, blocks: Iterable[KVCacheBlock], seconds: float) -> bool:
        """Hold these blocks, all of them or none."""
        kept = list(dict.fromkeys(block for block in blocks if not block.is_null))
        added = Counter(block.group_id for block in kept if block not in self._holders)
        pages = self._pages_of(added)
        if self.pages + pages > MAX_PINNED * (self._pool.pages.num_pages - 1):
            logger.warning(
                "a prefix is not pinned: %.1f pages beside %.1f pinned ones are more than %.0f %% "
                "of the state arena",
                pages,
                self.pages,
                100 * MAX_PINNED,
            )
            return False
        self._pool.touch(kept)
        self._holders.update(kept)
        self._num_blocks += added
        self._num_made += 1
        heapq.heappush(self._pins, (self._clock() + seconds, self._num_made, kept))
        return True

    def is_over(self) -> bool:
        """Whether there is a pin to let go of."""
        return bool(self._pins) and self._pins[0][0] <= self._clock()

    def expire(self) -> None:
        """Let go of what is over."""
        while self.is_over():
            self.release_next()

    def release_next(self) -> bool:
        """Let go of the pin that would end first; False if there is none."""
        if not self._pins:
            return False
        _, _, blocks = heapq.heappop(self._pins)
        self._let_go(blocks)
        return True

    def release_groups(self, groups: Container[int]) -> None:
        """Let go of the pins that hold blocks of these groups."""
        pins, self._pins = self._pins, []
        for pin in pins:
            if any(block.group_id in groups for block in pin[2]):
                self._let_go(pin[2])
            else:
                self._pins.append(pin)
        heapq.heapify(self._pins)

    def _let_go(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._num_blocks[block.group_id] -= 1
        self._pool.free_blocks(reversed(blocks))
