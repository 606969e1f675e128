# SPDX-License-Identifier: Apache-2.0
"""Keeps free blocks filled with NaN by replaying what the scheduler did, for the sanitizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm.v1.core.sched.output import BlockCopy, BlockOperation, BlocksFreed, BlocksTaken
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.block_tags import GroupTags
from vllm.v1.worker.state_probe import GroupProbe


class SanitizerError(RuntimeError):
    """State memory was misused: which request, group, block and token, and how."""


@dataclass(frozen=True)
class SanitizedGroup:
    """One group of layers, the `index`-th of its placement's `arena`; `name` is for messages."""

    name: str
    arena: Arena
    index: int
    spec: KVCacheSpec
    tags: GroupTags
    probe: GroupProbe

    def first_visible(self, num_computed: np.ndarray) -> np.ndarray:
        """The first token that those from `num_computed [n]` on can see."""
        window = self.spec.window
        if window is None:
            return np.zeros_like(num_computed)
        return np.asarray(np.maximum(num_computed - window + 1, 0))


class FreeMemory:
    """The blocks of all groups that nobody has, and the null page. Groups are numbered through all
    placements.

    A free block is NaN if its page was ever given out, else still zero, so that opening the arena
    costs nothing. `SanitizerError` if a block is not as it was left when it is taken.
    """

    def __init__(self, arena: Arena) -> None:
        self._groups: dict[int, SanitizedGroup] = {}
        self._pages = arena.buffer.view(torch.int64).view(arena.plan.num_pages, -1)
        self._opened = np.zeros(arena.plan.num_pages, dtype=bool)
        self._opened[0] = True

    def set_groups(self, first: int, groups: Sequence[SanitizedGroup]) -> None:
        """Groups from `first` on, in the place of others, whose blocks are free, or further ones.
        The log of what happened until then was replayed."""
        self._groups |= dict(enumerate(groups, first))

    def reset(self) -> None:
        """The arena is new memory, all zero, and no request holds any of it."""
        self._opened[1:] = False

    def clear_null_page(self) -> None:
        """Made-up requests were run, whose every block is null."""
        self._pages[0].zero_()

    def null_page_is_clear(self) -> bool:
        return not bool(self._pages[0].any())

    def replay(self, log: Sequence[BlockOperation]) -> None:
        """Copy, fill and check in the order in which the scheduler did these things."""
        for entry in log:
            group = self._groups[entry.group_id]
            if isinstance(entry, BlockCopy):
                self.check_copy(group, entry)
                group.arena.copy_blocks([BlockCopy(group.index, entry.source, entry.target)])
                continue
            block_ids = np.array(entry.block_ids, dtype=np.int64)
            self._open_pages(group, block_ids)
            if isinstance(entry, BlocksFreed):
                group.tags.freed(block_ids)
                group.probe.fill(block_ids)
            else:
                self._take(group, entry, block_ids)

    def check_copy(self, group: SanitizedGroup, copy: BlockCopy) -> None:
        """`SanitizerError` if it is of a free block or to one."""
        for block_id in (copy.source, copy.target):
            if not group.tags.in_use[block_id]:
                raise SanitizerError(
                    f"{group.name}, block {block_id}: copied from block {copy.source} to "
                    f"{copy.target} while it is free"
                )

    def _take(self, group: SanitizedGroup, entry: BlocksTaken, block_ids: np.ndarray) -> None:
        problem = group.tags.taken(block_ids, np.array(entry.generations, dtype=np.int32))
        if problem is not None:
            raise SanitizerError(f"{group.name}: one of the blocks {entry.block_ids} {problem}")
        touched = group.probe.touched(block_ids)
        if touched is not None:
            raise SanitizerError(f"{group.name}, block {touched}: was written to while it was free")

    def _open_pages(self, group: SanitizedGroup, block_ids: np.ndarray) -> None:
        pages = np.unique(block_ids // group.tags.num_null)
        pages = pages[~self._opened[pages]]
        for page in pages.tolist():
            if bool(self._pages[page].any()):
                raise SanitizerError(f"page {page}, given to {group.name}, was written to before")
            self._pages[page].fill_(-1)
        self._opened[pages] = True
