# SPDX-License-Identifier: Apache-2.0
"""Makes the block lists of a request longer, in all groups or in none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

Blocks = list[list[KVCacheBlock]]


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """What a request is to be given: blocks `found` in the cache, for its lists; `hits`, all that
    it then holds; per group the null and new blocks to append."""

    found: Blocks
    hits: list[KVCacheBlock]
    num_null: list[int]
    num_new: list[int]


class BlockGrowth:
    """`watermark_pages`: unpinned pages that a new request must leave while others hold blocks.
    `managers`: of the pool's groups from `first_group` on."""

    def __init__(
        self,
        managers: Sequence[SingleTypeKVCacheManager],
        pool: BlockPool,
        watermark_pages: int,
        first_group: int = 0,
    ) -> None:
        self._managers = managers
        self._pool = pool
        self._watermark_pages = watermark_pages
        self._first_group = first_group

    def knows(self, request_id: str) -> bool:
        """Whether the request has block lists."""
        return bool(self._managers) and request_id in self._managers[0].req_to_blocks

    def short_of_blocks(self, request_id: str, num_tokens: int) -> list[int]:
        """Managers, by their index, whose list does not cover `num_tokens`."""
        return [
            i
            for i, m in enumerate(self._managers)
            if (blocks := m.req_to_blocks.get(request_id)) is None
            or len(blocks) < m.num_blocks_for(num_tokens)
        ]

    def append_one(self, request_id: str, index: int, num_tokens: int) -> Blocks | None:
        """One block for this manager's list to cover `num_tokens`, as `plan` and `grow` would
        append it; None, and nothing has changed, if one is not enough or cannot be had."""
        manager = self._managers[index]
        blocks = manager.req_to_blocks.get(request_id)
        if not blocks or len(blocks) + 1 < manager.num_blocks_for(num_tokens):
            return None
        block = self._pool.get_new_block(near=blocks[-1])
        if block is None:
            return None
        blocks.append(block)
        return [[block] if m is manager else [] for m in self._managers]

    def plan(
        self,
        request_id: str,
        found: Blocks,
        sources: Sequence[KVCacheBlock | None],
        num_computed_tokens: int,
        num_tokens: int,
    ) -> GrowthPlan | None:
        """What the lists need to cover `num_tokens`; None if any group cannot have its blocks.

        A new request takes `found` first; `sources` are held as well. Nothing changes before
        `grow`, which must follow at once.
        """
        needs = [
            manager.plan_growth(
                len(manager.blocks_of(request_id)) + len(blocks), num_computed_tokens, num_tokens
            )
            for manager, blocks in zip(self._managers, found, strict=True)
        ]
        hits = [block for blocks in found for block in blocks]
        hits += [source for source in sources if source is not None]
        num_null, num_new = [need[0] for need in needs], [need[1] for need in needs]
        keep = self._pages_to_keep(is_new=not self.knows(request_id))
        if not self._pool.can_allocate(num_new, hits, keep, self._first_group):
            return None
        return GrowthPlan(found, hits, num_null, num_new)

    def grow(self, request_id: str, plan: GrowthPlan) -> Blocks:
        """Carry out a plan; returns what was appended to each list."""
        self._pool.touch(plan.hits)
        if not self.knows(request_id):
            for manager, blocks in zip(self._managers, plan.found, strict=True):
                manager.start(request_id, blocks)
        near = [manager.last_block(request_id) for manager in self._managers]
        new = self._pool.get_new_blocks(plan.num_new, near, self._first_group)
        appended = [
            [self._pool.null_block] * num_null + blocks
            for num_null, blocks in zip(plan.num_null, new, strict=True)
        ]
        for manager, blocks in zip(self._managers, appended, strict=True):
            manager.extend(request_id, blocks)
        return appended

    def found_blocks(
        self,
        request: Request,
        computed_blocks: KVCacheBlocks | None,
        num_found_tokens: int,
        num_computed_tokens: int,
    ) -> Blocks:
        """The shared blocks of a cached prefix, after checking that all of it is still there."""
        if computed_blocks is None or not num_found_tokens:
            return [[] for _ in self._managers]
        if self.knows(request.request_id):
            raise ValueError(
                f"request {request.request_id} has blocks already and cannot take cached ones"
            )
        sources = computed_blocks.sources or (None,) * len(self._managers)
        found = []
        for manager, blocks, source in zip(
            self._managers, computed_blocks.blocks, sources, strict=True
        ):
            current = manager.is_current(blocks, request) and (
                source is None or manager.holds(source, request, num_found_tokens)
            )
            if not current:
                raise ValueError("a cached block was evicted between look-up and allocation")
            found.append(manager.clip(blocks, num_computed_tokens))
        return found

    def _pages_to_keep(self, is_new: bool) -> int:
        others_run = self._pool.pages.num_live_blocks > 0
        return self._watermark_pages if is_new and others_run else 0
