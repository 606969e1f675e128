# SPDX-License-Identifier: Apache-2.0
"""State memory as the scheduler uses it: blocks of every group for every request."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence, Set

from vllm.cache_options import CacheReport
from vllm.distributed.kv_events.messages import KVCacheEvent
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.block_events import BlockEvents
from vllm.v1.core.block_growth import BlockGrowth, Blocks
from vllm.v1.core.block_journal import BlockJournal
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.checkpoint_keeper import CheckpointKeeper
from vllm.v1.core.checkpoint_policy import CheckpointPolicy
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.pinned_prefixes import PinnedPrefixes
from vllm.v1.core.prefix_cache import reads_prefix_cache
from vllm.v1.core.prefix_lookup import PrefixMatches
from vllm.v1.core.sched.output import BlockCopy, BlockOperation
from vllm.v1.core.single_type_kv_cache_manager import get_manager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

__all__ = ["KVCacheBlocks", "KVCacheManager"]


class KVCacheManager:
    """Allocates, shares, caches and frees the blocks of requests.

    `watermark`: part of the arena's pages that admitting a request must leave available while
    others are running. Raises `ValueError` for a watermark outside `[0, 1)` and for KV events
    without a prefix cache, whose content they tell.

    Where requests choose among placements of a supernet each placement has a manager of its own,
    for its groups, and all share the `pool` and the `pins`: its groups are the pool's from
    `first_group` on. What it says of groups counts its own from 0.
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
        checkpoint_interval: int | None = None,
        sanitize: bool = False,
        pool: BlockPool | None = None,
        pins: PinnedPrefixes | None = None,
        first_group: int = 0,
    ) -> None:
        if not 0.0 <= watermark < 1.0:
            raise VLLMValidationError(f"watermark must be in [0, 1), got {watermark}")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        plan = kv_cache_config.plan
        self.block_pool = BlockPool(plan) if pool is None else pool
        self._first_group = first_group
        if sanitize and self.block_pool.pages.journal is None:
            self.block_pool.pages.journal = BlockJournal()
        groups = kv_cache_config.kv_cache_groups
        has_state = kv_cache_config.has_mamba_layers
        self.managers = [
            get_manager(group.kv_cache_spec, first_group + i, self.block_pool, exact=has_state)
            for i, group in enumerate(groups)
        ]
        self._windowed = [m for m in self.managers if m.window]
        self.enable_caching = enable_caching and bool(self.managers)
        if enable_kv_cache_events:
            if not self.enable_caching:
                raise VLLMValidationError(
                    "KV events need the prefix cache: --enable-prefix-caching"
                )
            self.block_pool.events = BlockEvents([group.kv_cache_spec for group in groups])
        self.checkpoints: CheckpointKeeper | None = None
        if self.enable_caching and has_state:
            self.checkpoints = self._make_keeper(checkpoint_interval)
        self.pins = PinnedPrefixes(self.block_pool) if pins is None else pins
        #: requests whose blocks are still read, but hold nothing that may be found
        self._forgotten: set[str] = set()
        self._nothing = self._empty()
        watermark_pages = math.ceil(watermark * (plan.num_pages - 1))
        self._growth = BlockGrowth(self.managers, self.block_pool, watermark_pages, first_group)
        self._matches = PrefixMatches(self.managers, self.block_pool)

    def _make_keeper(self, interval: int | None) -> CheckpointKeeper:
        plan = self.kv_cache_config.plan
        sizes = [m.block_size for m in self.managers if not m.is_recurrent]
        block_size = min(sizes, default=1)
        paged_bytes = state_bytes = 0
        for index, manager in enumerate(self.managers):
            num_bytes = plan.block_stride(index)
            if manager.is_recurrent:
                state_bytes += num_bytes
            else:
                paged_bytes += num_bytes * block_size // manager.block_size
        ahead = max(manager.num_ahead for manager in self.managers)
        policy = CheckpointPolicy(block_size, paged_bytes, interval, num_ahead=ahead)
        return CheckpointKeeper(
            self.managers, self.block_pool, policy, state_bytes, self._first_group
        )

    # ---- around a step -------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Call before scheduling a step: what the one before saved can be found from here on."""
        self.pins.expire()
        if self.checkpoints is not None:
            self.checkpoints.begin_step()

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Block copies to make before and after the step just scheduled."""
        for manager in self.managers:
            manager.end_step()
        return self.checkpoints.take_copies() if self.checkpoints is not None else ([], [])

    def take_kept_states(self) -> dict[str, int]:
        """See `SchedulerOutput.kept_states`."""
        return self.checkpoints.take_kept() if self.checkpoints is not None else {}

    def take_block_log(self) -> list[BlockOperation] | None:
        """What happened to blocks since the last call; None unless the engine sanitizes."""
        journal = self.block_pool.pages.journal
        return journal.take() if journal is not None else None

    def plan_checkpoints(self, request: Request, num_computed_tokens: int) -> None:
        """Decide where a request that starts at `num_computed_tokens` leaves checkpoints; then
        ask `chunk_end` where its chunks must end."""
        if self.checkpoints is not None:
            diverged = self._matches.diverged(request.request_id)
            self.checkpoints.plans.make(request, num_computed_tokens, diverged)

    def chunk_end(self, request_id: str, num_computed_tokens: int) -> int | None:
        """The next token count at which a chunk of the request must end, if there is one."""
        if self.checkpoints is None:
            return None
        return self.checkpoints.plans.next_position(request_id, num_computed_tokens)

    def drop_checkpoints(self, request: Request) -> None:
        """The request computes no more: nobody waits for checkpoints it was to leave."""
        if self.checkpoints is not None:
            self.checkpoints.plans.drop(request.request_id)

    def is_coming(self, request: Request, num_cached_tokens: int) -> bool:
        """Whether another request is about to leave a longer prefix of this one in the cache."""
        if self.checkpoints is None or not reads_prefix_cache(request):
            return False
        return self.checkpoints.plans.awaited(request, num_cached_tokens) > 0

    # ---- prefix hits ---------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix and its length in tokens; never covers the last token.

        Nothing is held: pass the blocks to `allocate_slots` before any other allocation.
        """
        if not self.enable_caching or not reads_prefix_cache(request):
            return self._empty(), 0
        match = self._matches.find(request)
        found = KVCacheBlocks(
            tuple(hit.blocks for hit in match.hits), tuple(hit.source for hit in match.hits)
        )
        return found, match.num_tokens

    def discard_match(self, request: Request) -> None:
        """What the last look-up of the request found is not used."""
        self._matches.discard(request.request_id)

    def take_report(self, request: Request) -> CacheReport | None:
        """What the last look-up of the request found, and what it did not and why; None without
        a prefix cache."""
        return self._matches.take_report(request) if self.enable_caching else None

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
        # Drafts in flight may be rejected: what the token before them sees is still needed.
        self.remove_skipped_blocks(request_id, computed - request.num_drafts_in_flight)
        is_new = not self._growth.knows(request_id)
        appended = self._grow(request, new_computed_blocks, local, computed, num_tokens)
        if appended is None:
            return None
        if not delay_cache_blocks:
            self.cache_blocks(request, computed + num_new_tokens)
        if self.checkpoints is not None:
            if new_computed_blocks is not None and new_computed_blocks.sources:
                self.checkpoints.start_from(request_id, new_computed_blocks.sources, local)
            if is_new:
                self.checkpoints.begin(request, computed)
            self.checkpoints.advance(request, computed + num_new_tokens)
        return KVCacheBlocks(tuple(appended)) if appended else self._nothing

    def _grow(
        self,
        request: Request,
        computed_blocks: KVCacheBlocks | None,
        num_found_tokens: int,
        num_computed_tokens: int,
        num_tokens: int,
    ) -> Blocks | None:
        """Make the request's lists cover `num_tokens`; what was appended to each (nothing at all:
        an empty list), or None if any group cannot have its blocks."""
        request_id, growth = request.request_id, self._growth
        sources: Sequence[KVCacheBlock | None] = ()
        if computed_blocks is not None:
            sources = computed_blocks.sources
        else:
            short = growth.short_of_blocks(request_id, num_tokens)
            if not short:
                return []
            if len(short) == 1:
                appended = growth.append_one(request_id, short[0], num_tokens)
                if appended is not None:
                    return appended
        found = growth.found_blocks(request, computed_blocks, num_found_tokens, num_computed_tokens)
        plan = growth.plan(request_id, found, sources, num_computed_tokens, num_tokens)
        if plan is None:
            return None
        if not growth.knows(request_id):
            self._matches.settle(request)
        return growth.grow(request_id, plan)

    def _check_amount(self, num_new_tokens: int, num_external_tokens: int) -> None:
        if num_new_tokens + num_external_tokens <= 0:
            raise ValueError("allocate_slots needs new or external tokens")
        if num_new_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"{num_new_tokens} new tokens in one step: windowed layers were given memory for "
                f"max_num_batched_tokens = {self.max_num_batched_tokens}"
            )

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
        if self.block_pool.events is not None:
            self.block_pool.events.request = request
        for manager in self.managers:
            manager.cache(request.request_id, request, num_computed_tokens)

    def quiet_until(self, request: Request) -> int:
        """After `allocate_slots` for a step that starts at `request.num_computed_tokens`: while
        fewer tokens than this are computed, a step of one token needs no call of it."""
        request_id, computed = request.request_id, request.num_computed_tokens
        checkpoint = self.chunk_end(request_id, computed)
        quiet = sys.maxsize if checkpoint is None else checkpoint - 1
        lag = request.num_output_placeholders if self.enable_caching else None
        settled = computed - request.num_drafts_in_flight
        for manager in self.managers:
            quiet = min(quiet, manager.quiet_until(request_id, settled, lag))
        return quiet

    # ---- giving back ---------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Let go of all the request's blocks, the last ones first; unknown requests are ignored.

        Call it before `request.num_computed_tokens` is reset: blocks past it were scheduled but
        never computed, and the cache forgets them.
        """
        self._matches.discard(request.request_id)
        if request.request_id in self._forgotten:
            self._forgotten.remove(request.request_id)
        else:
            if self._growth.knows(request.request_id):
                # With tokens that were still on the device when the last step was scheduled.
                self.cache_blocks(request, request.num_computed_tokens)
            if request.cache.pin_seconds and request.is_finished and self.enable_caching:
                self._pin(request)
        if self.checkpoints is not None:
            self.checkpoints.leave(request)
        for manager in self.managers:
            manager.free(request.request_id, request.num_computed_tokens)

    def _pin(self, request: Request) -> None:
        """Keep all the request has computed, and the checkpoints on the way, from eviction."""
        blocks = [block for m in self.managers for block in m.blocks_of(request.request_id)]
        if self.checkpoints is not None:
            blocks += self.checkpoints.blocks_left_by(request)
        self.pins.pin(blocks, request.cache.pin_seconds)

    def forget_after(self, request: Request, num_tokens: int) -> None:
        """No later request may find what this one computed after `num_tokens` tokens, until it
        has computed that again. Call it whenever `request.num_computed_tokens` goes back."""
        if self.checkpoints is not None:
            self.checkpoints.forget_after(request, num_tokens)
        for manager in self.managers:
            manager.rewind(request.request_id, num_tokens)
            blocks = manager.blocks_of(request.request_id)
            for block in blocks[num_tokens // manager.block_size :]:
                self.block_pool.uncache_block(block)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make the prefix cache forget blocks with these ids, in every group."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self, finished: Sequence[Request] = ()) -> bool:
        """Forget all cached content, pinned or not; False, and nothing is forgotten, while requests
        hold blocks, but for these `finished` ones, which compute no more: a transfer reads their
        blocks, and nobody finds them."""
        ended = {request.request_id for request in finished}
        if any(manager.req_to_blocks.keys() - ended for manager in self.managers):
            return False
        self.begin_step()
        while self.pins.release_next():
            pass
        for request in finished:
            self.forget_after(request, 0)
            self._forgotten.add(request.request_id)
        return self.block_pool.reset_prefix_cache(held_too=bool(finished))

    def take_events(self) -> list[KVCacheEvent]:
        """What the prefix cache gained and lost since the last call, if events are enabled."""
        return self.block_pool.events.take() if self.block_pool.events is not None else []

    # ---- views ---------------------------------------------------------------------------------

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request; empty for an unknown one."""
        return KVCacheBlocks(tuple(list(m.blocks_of(request_id)) for m in self.managers))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Ids of all blocks of a request, per group; empty lists for an unknown one."""
        return self.get_blocks(request_id).get_block_ids()

    def holders_of(self, blocks: Set[tuple[int, int]]) -> set[str]:
        """Requests that hold one of these, pairs of group and block id."""
        return {
            request_id
            for group, manager in enumerate(self.managers)
            for request_id, held in manager.req_to_blocks.items()
            if any((group, block.block_id) in blocks for block in held)
        }

    @property
    def usage(self) -> float:
        """Part of the arena held by requests, 0 to 1, by bytes; see `BlockPool.usage`."""
        return self.block_pool.usage

    def _empty(self) -> KVCacheBlocks:
        return KVCacheBlocks(tuple([] for _ in self.managers))
