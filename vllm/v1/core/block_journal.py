# SPDX-License-Identifier: Apache-2.0
"""What happens to blocks between two steps, in order, for the sanitizer of the workers.

Order matters: the source of a copy may be evicted and handed to somebody else within the same
step, so a worker that fills freed blocks must do so between the right copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import BlockCopy, BlockOperation, BlocksFreed, BlocksTaken


class BlockJournal:
    """Records every block that stops and starts being free, and the copies made in between.

    A block's *generation* counts how often it was taken; it names one use of the block.
    """

    def __init__(self) -> None:
        #: (group id, block id) -> generation, of blocks taken at least once
        self._generations: dict[tuple[int, int], int] = {}
        self._log: list[BlockOperation] = []

    def forget_groups(self, group_ids: Sequence[int]) -> None:
        """Other groups take these places; `take` gave what is known of the old ones."""
        gone = set(group_ids)
        known = self._generations
        self._generations = {key: count for key, count in known.items() if key[0] not in gone}

    def taken(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks of one group are free no longer."""
        if not blocks:
            return
        group_id = blocks[0].group_id
        last = self._log[-1] if self._log else None
        if not isinstance(last, BlocksTaken) or last.group_id != group_id:
            last = BlocksTaken(group_id, [], [])
            self._log.append(last)
        for block in blocks:
            key = group_id, block.block_id
            generation = self._generations[key] = self._generations.get(key, 0) + 1
            last.block_ids.append(block.block_id)
            last.generations.append(generation)

    def freed(self, block: KVCacheBlock) -> None:
        """Nobody holds the block and the cache cannot find it."""
        last = self._log[-1] if self._log else None
        if not isinstance(last, BlocksFreed) or last.group_id != block.group_id:
            last = BlocksFreed(block.group_id, [])
            self._log.append(last)
        last.block_ids.append(block.block_id)

    def copied(self, copy: BlockCopy) -> None:
        """A copy to be made before the next step."""
        self._log.append(copy)

    def take(self) -> list[BlockOperation]:
        """Everything since the last call, in the order in which it happened."""
        log, self._log = self._log, []
        return log
