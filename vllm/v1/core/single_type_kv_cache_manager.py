# SPDX-License-Identifier: Apache-2.0
"""How each kind of layer uses blocks: one manager per state group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.core.prefix_cache import GroupHit
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)


class SingleTypeKVCacheManager(ABC):
    """Block lists of all requests for one group.

    `can_hit`: whether a cached prefix can ever be continued by this kind of state.
    """

    can_hit: ClassVar[bool] = True

    def __init__(self, spec: KVCacheSpec, group_id: int, pool: BlockPool) -> None:
        self.spec = spec
        self.group_id = group_id
        self.pool = pool
        self.block_size = spec.block_size
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        #: blocks at the start of the list whose hashing is settled, and those of them that were
        #: found in the cache rather than computed
        self._num_hashed: dict[str, int] = {}
        self._num_found: dict[str, int] = {}

    # ---- what differs between kinds ------------------------------------------------------------

    @abstractmethod
    def num_blocks_for(self, num_tokens: int) -> int:
        """Length of the block list of a request with `num_tokens` tokens."""

    @abstractmethod
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens at the front no later step reads."""

    @abstractmethod
    def find_longest_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> GroupHit:
        """See `HitSource`."""

    # ---- a request's blocks --------------------------------------------------------------------

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        return self.req_to_blocks.get(request_id, [])

    def last_block(self, request_id: str) -> KVCacheBlock | None:
        blocks = self.req_to_blocks.get(request_id)
        return blocks[-1] if blocks else None

    def is_current(self, found: Sequence[KVCacheBlock], block_hashes: Sequence[BlockHash]) -> bool:
        """Whether blocks found earlier still hold what they were found for."""
        return all(
            block.is_null
            or block.block_hash == make_block_hash_with_group_id(block_hash, self.group_id)
            for block, block_hash in zip(found, block_hashes, strict=False)
        )

    def clip(self, blocks: Sequence[KVCacheBlock], num_computed_tokens: int) -> list[KVCacheBlock]:
        """`blocks` of a prefix, with null blocks where nothing will be read."""
        skipped = self._num_skipped_blocks(num_computed_tokens)
        null = self.pool.null_block
        return [null if i < skipped else block for i, block in enumerate(blocks)]

    def plan_growth(
        self, num_present: int, num_computed_tokens: int, num_tokens: int
    ) -> tuple[int, int]:
        """`(null blocks, new blocks)` to append to a list of `num_present` blocks so that it
        covers `num_tokens`, of which `num_computed_tokens` are computed already."""
        missing = max(self.num_blocks_for(num_tokens) - num_present, 0)
        skipped = max(self._num_skipped_blocks(num_computed_tokens) - num_present, 0)
        num_null = min(skipped, missing)
        return num_null, missing - num_null

    def start(self, request_id: str, found: list[KVCacheBlock]) -> None:
        """Take in a request with the blocks the cache found (held by the caller)."""
        self.req_to_blocks[request_id] = list(found)
        self._num_hashed[request_id] = self._num_found[request_id] = len(found)

    def extend(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        self.req_to_blocks[request_id].extend(blocks)

    def remove_skipped(self, request_id: str, num_computed_tokens: int) -> None:
        """Let go of blocks no later step reads; null blocks take their place."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        last = min(self._num_skipped_blocks(num_computed_tokens), len(blocks)) - 1
        removed: list[KVCacheBlock] = []
        for i in range(last, -1, -1):
            if blocks[i].is_null:
                break
            removed.append(blocks[i])
            blocks[i] = self.pool.null_block
        # The oldest token's block is the first a later hit can do without.
        self.pool.free_blocks(reversed(removed))

    def cache(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Let the cache find the full blocks of the first `num_tokens` tokens."""
        blocks = self.req_to_blocks[request_id]
        num_full = min(num_tokens // self.block_size, len(block_hashes), len(blocks))
        for i in range(self._num_hashed[request_id], num_full):
            if not blocks[i].is_null:
                self.pool.cache_block(blocks[i], block_hashes[i])
        self._num_hashed[request_id] = max(self._num_hashed[request_id], num_full)

    def rewind(self, request_id: str, num_computed_tokens: int) -> None:
        """The tokens from here on will be computed (and their blocks hashed) again."""
        settled = num_computed_tokens // self.block_size
        self._num_hashed[request_id] = min(self._num_hashed[request_id], settled)

    def free(self, request_id: str, num_computed_tokens: int) -> None:
        """Let go of all blocks, the last ones first, so that prefixes survive longest.

        Blocks hashed for tokens that were then not computed are forgotten.
        """
        blocks = self.req_to_blocks.pop(request_id, None)
        if blocks is None:
            return
        hashed = self._num_hashed.pop(request_id)
        first = max(self._num_found.pop(request_id), num_computed_tokens // self.block_size)
        for block in blocks[first:hashed]:
            if not block.is_null:
                self.pool.uncache_block(block)
        self.pool.free_blocks(reversed(blocks))

    def _num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return self.num_skipped_tokens(num_computed_tokens) // self.block_size


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token is kept: full attention, MLA and captured hidden states."""

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def find_longest_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> GroupHit:
        found: list[KVCacheBlock] = []
        for block_hash in block_hashes[: max_tokens // self.block_size]:
            block = self.pool.get_cached_block(block_hash, self.group_id)
            if block is None:
                break
            found.append(block)
        return GroupHit(len(found) * self.block_size, found)


class SlidingWindowManager(SingleTypeKVCacheManager):
    """The last `window` tokens are kept; a hit needs only the blocks its next token can see."""

    def __init__(self, spec: SlidingWindowSpec, group_id: int, pool: BlockPool) -> None:
        super().__init__(spec, group_id, pool)
        self.window = spec.sliding_window

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.window + 1, 0)

    def find_longest_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> GroupHit:
        end = min(max_tokens // self.block_size, len(block_hashes))
        run: list[KVCacheBlock] = []
        for i in range(end - 1, -1, -1):
            block = self.pool.get_cached_block(block_hashes[i], self.group_id)
            if block is None:
                run = []
                end = i
                continue
            run.append(block)
            if i == self._num_skipped_blocks(end * self.block_size):
                nulls = [self.pool.null_block] * i
                return GroupHit(end * self.block_size, nulls + run[::-1])
        return GroupHit(0, [])


class RecurrentManager(SingleTypeKVCacheManager):
    """One state for the request's life, plus `num_speculative_blocks` for draft tokens.

    A recurrent state exists at one token count only. Without checkpoints no prefix can be
    continued; they enter through `find_longest_hit`, which then returns the longest checkpoint
    of at most `max_tokens` tokens, and `can_hit`.
    """

    can_hit = False

    def __init__(self, spec: MambaSpec, group_id: int, pool: BlockPool) -> None:
        super().__init__(spec, group_id, pool)
        self.num_states = 1 + spec.num_speculative_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return self.num_states

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def cache(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """The running state changes every step: there is nothing a hash could name."""

    def find_longest_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> GroupHit:
        return GroupHit(0, [])


def get_manager(spec: KVCacheSpec, group_id: int, pool: BlockPool) -> SingleTypeKVCacheManager:
    """The manager of a group; `ValueError` for a kind of state the arena cannot keep."""
    if isinstance(spec, MambaSpec):
        return RecurrentManager(spec, group_id, pool)
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowManager(spec, group_id, pool)
    if isinstance(spec, FullAttentionSpec):
        return FullAttentionManager(spec, group_id, pool)
    raise ValueError(f"no cache manager for {type(spec).__name__}")
