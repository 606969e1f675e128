# SPDX-License-Identifier: Apache-2.0
"""State memory as the scheduler uses it: blocks of every group for every request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from vllm import decisions
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.prefix_cache import PrefixCacheStats, find_common_hit, reads_prefix_cache
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager, get_manager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request


@dataclass
class KVCacheBlocks:
    """Blocks per group, in token order; null blocks (id 0) where nothing is kept."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        return KVCacheBlocks(
            tuple([*a, *b] for a, b in zip(self.blocks, other.blocks, strict=True))
        )

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: Literal[True]) -> tuple[list[int], ...] | None: ...
    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Ids per group; None, if allowed, when there is no block at all."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of a single group's blocks the prefix cache cannot find."""
        if len(self.blocks) != 1:
            raise ValueError(f"{len(self.blocks)} groups: use get_unhashed_block_ids_all_groups()")
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Per group, ids of blocks the prefix cache cannot find; null blocks left out."""
        return [
            [b.block_id for b in group if b.block_hash is None and not b.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, for as many groups."""
        return KVCacheBlocks(tuple([] for _ in self.blocks))


class KVCacheManager:
    """Allocates, shares, caches and frees the blocks of requests.

    `watermark`: part of the arena's pages that admitting a request must leave available while
    others are running. Raises `ValueError` for a watermark outside `[0, 1)` and for KV events,
    which are not supported.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        max_num_batched_tokens: int,
        enable_caching: bool,
        watermark: float = 0.0,
        enable_kv_cache_events: bool = False,
    ) -> None:
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {watermark}")
        if enable_kv_cache_events:
            raise ValueError("KV cache events are not supported; unset enable_kv_cache_events")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        plan = kv_cache_config.plan
        self.block_pool = BlockPool(plan)
        self.managers = [
            get_manager(group.kv_cache_spec, group_id, self.block_pool)
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        self._windowed = [m for m in self.managers if isinstance(m, SlidingWindowManager)]
        self.enable_caching = enable_caching and self._every_group_can_hit()
        self._watermark_pages = math.ceil(watermark * (plan.num_pages - 1))
        self._stats = PrefixCacheStats()

    def _every_group_can_hit(self) -> bool:
        stuck = [type(m.spec).__name__ for m in self.managers if not m.can_hit]
        if stuck:
            decisions.record(
                "prefix cache",
                "off",
                f"{', '.join(stuck)} layers keep no checkpoints, so no prefix can be continued",
                instead_of="on",
            )
        return bool(self.managers) and not stuck

    # ---- prefix hits ---------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix and its length in tokens; never covers the last token.

        Nothing is held: pass the blocks to `allocate_slots` before any other allocation.
        """
        if not self.enable_caching or not reads_prefix_cache(request):
            return self._empty(), 0
        num_tokens, blocks = find_common_hit(
            self.managers, request.block_hashes, request.num_tokens - 1
        )
        self._stats.requests += 1
        self._stats.queries += request.num_tokens
        self._stats.hits += num_tokens
        return KVCacheBlocks(tuple(blocks)), num_tokens

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """Look-ups since the last call, one for every `get_computed_blocks` that searched."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    # ---- allocation ----------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> KVCacheBlocks | None:
        """Blocks for `num_new_tokens` more tokens of a request; the newly appended ones.

        The request has, in this order: `request.num_computed_tokens`, then
        `num_new_computed_tokens` found in the cache (`new_computed_blocks`, which become the
        request's but are not returned), then `num_external_computed_tokens` a connector will
        load, then the new tokens and `num_lookahead_tokens` draft slots; nothing past
        `max_model_len` gets a slot.

        Full blocks of known tokens are hashed at once, unless `delay_cache_blocks` (an
        asynchronous load: call `cache_blocks` when it is done). Returns None if any group cannot
        have its blocks; then nothing has changed, except that blocks which had slid out of a
        window are free. Raises `ValueError` for nothing to allocate and for more new tokens than
        a step may have.
        """
        self._check_amount(num_new_tokens, num_external_computed_tokens)
        request_id = request.request_id
        local = request.num_computed_tokens + num_new_computed_tokens
        computed = min(local + num_external_computed_tokens, self.max_model_len)
        num_tokens = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        self.remove_skipped_blocks(request_id, computed)
        if new_computed_blocks is None and self._covers(request_id, num_tokens):
            appended: list[list[KVCacheBlock]] | None = [[] for _ in self.managers]
        else:
            found = self._found_blocks(request, new_computed_blocks, computed)
            appended = self._grow(request_id, found, computed, num_tokens)
        if appended is None:
            return None
        if self.enable_caching:
            for manager in self.managers:
                manager.rewind(request_id, local)
            if not delay_cache_blocks:
                self.cache_blocks(request, computed + num_new_tokens)
        return KVCacheBlocks(tuple(appended))

    def _grow(
        self,
        request_id: str,
        found: list[list[KVCacheBlock]],
        num_computed_tokens: int,
        num_tokens: int,
    ) -> list[list[KVCacheBlock]] | None:
        """Make the request's lists cover `num_tokens`: all groups or none."""
        growth = [
            manager.plan_growth(
                len(manager.blocks_of(request_id)) + len(blocks), num_computed_tokens, num_tokens
            )
            for manager, blocks in zip(self.managers, found, strict=True)
        ]
        demands = [num_new for _, num_new in growth]
        hits = [block for blocks in found for block in blocks]
        is_new = not self._knows(request_id)
        if not self.block_pool.can_allocate(demands, hits, self._pages_to_keep(is_new)):
            return None
        self.block_pool.touch(hits)
        if is_new:
            for manager, blocks in zip(self.managers, found, strict=True):
                manager.start(request_id, blocks)
        near = [manager.last_block(request_id) for manager in self.managers]
        new = self.block_pool.get_new_blocks(demands, near)
        appended = [
            [self.block_pool.null_block] * num_null + blocks
            for (num_null, _), blocks in zip(growth, new, strict=True)
        ]
        for manager, blocks in zip(self.managers, appended, strict=True):
            manager.extend(request_id, blocks)
        return appended

    def _check_amount(self, num_new_tokens: int, num_external_tokens: int) -> None:
        if num_new_tokens + num_external_tokens <= 0:
            raise ValueError("allocate_slots needs new or external tokens")
        if num_new_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"{num_new_tokens} new tokens in one step: windowed layers were given memory for "
                f"max_num_batched_tokens = {self.max_num_batched_tokens}"
            )

    def _found_blocks(
        self, request: Request, computed_blocks: KVCacheBlocks | None, num_computed_tokens: int
    ) -> list[list[KVCacheBlock]]:
        if computed_blocks is None or not any(computed_blocks.blocks):
            return [[] for _ in self.managers]
        if self._knows(request.request_id):
            raise ValueError(
                f"request {request.request_id} has blocks already and cannot take cached ones"
            )
        found = []
        for manager, blocks in zip(self.managers, computed_blocks.blocks, strict=True):
            if not manager.is_current(blocks, request.block_hashes):
                raise ValueError("a cached block was evicted between look-up and allocation")
            found.append(manager.clip(blocks, num_computed_tokens))
        return found

    def _pages_to_keep(self, is_new: bool) -> int:
        others_run = self.block_pool.pages.num_live_blocks > 0
        return self._watermark_pages if is_new and others_run else 0

    def _covers(self, request_id: str, num_tokens: int) -> bool:
        for manager in self.managers:
            blocks = manager.req_to_blocks.get(request_id)
            if blocks is None or len(blocks) < manager.num_blocks_for(num_tokens):
                return False
        return True

    def _knows(self, request_id: str) -> bool:
        return bool(self.managers) and request_id in self.managers[0].req_to_blocks

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Let go of blocks that slid out of their windows; null blocks take their place."""
        for manager in self._windowed:
            manager.remove_skipped(request_id, num_computed_tokens)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let the cache find the request's full blocks of the first `num_computed_tokens` tokens.

        Only as far as the tokens are known: `request.block_hashes` has no entry for a block with
        a token whose value is still on the device.
        """
        if not self.enable_caching:
            return
        for manager in self.managers:
            manager.cache(request.request_id, request.block_hashes, num_computed_tokens)

    # ---- giving back ---------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Let go of all the request's blocks, the last ones first; unknown requests are ignored.

        Call it before `request.num_computed_tokens` is reset: blocks past it were scheduled but
        never computed, and the cache forgets them.
        """
        for manager in self.managers:
            manager.free(request.request_id, request.num_computed_tokens)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make the prefix cache forget blocks with these ids, in every group."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, and nothing happens, while requests hold blocks."""
        return self.block_pool.reset_prefix_cache()

    # ---- views ---------------------------------------------------------------------------------

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request; empty for an unknown one."""
        return KVCacheBlocks(tuple(list(m.blocks_of(request_id)) for m in self.managers))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Ids of all blocks of a request, per group; empty lists for an unknown one."""
        return tuple(
            [block.block_id for block in manager.blocks_of(request_id)] for manager in self.managers
        )

    @property
    def usage(self) -> float:
        """Part of the arena held by requests, 0 to 1, by bytes; see `BlockPool.usage`."""
        return self.block_pool.usage

    def _empty(self) -> KVCacheBlocks:
        return KVCacheBlocks(tuple([] for _ in self.managers))
