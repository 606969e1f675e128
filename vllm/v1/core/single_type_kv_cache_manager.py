# SPDX-License-Identifier: Apache-2.0
"""How each kind of layer uses blocks: one manager per state group."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.core.prefix_cache import GroupHit, GroupPrefix, Prefix
from vllm.v1.kv_cache_interface import KVCacheSpec


class SingleTypeKVCacheManager(ABC):
    """Block lists of all requests for one group.

    `exact`: whether hits may end inside a block, which is then copied. Models with recurrent state
    need that, since a state exists at one token count only; the others hit whole blocks.
    """

    def __init__(
        self, spec: KVCacheSpec, group_id: int, pool: BlockPool, exact: bool = False
    ) -> None:
        self.spec = spec
        self.group_id = group_id
        self.pool = pool
        self.exact = exact
        self.block_size = spec.block_size
        self.num_blocks_for = spec.blocks_for
        self.num_ahead = spec.num_lookahead_tokens
        self.is_recurrent = spec.is_recurrent
        #: tokens that are kept, 0 for all
        self.window = spec.window or 0
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        #: blocks at the start of the list whose hashing is settled, and those of them that were
        #: found in the cache rather than computed
        self._num_hashed: dict[str, int] = {}
        self._num_found: dict[str, int] = {}
        #: full blocks that the step being scheduled may still have to fill: they can be shared,
        #: but a copy would be made before that
        self._filling: set[KVCacheBlock] = set()

    def keys(self, prefix: Prefix) -> Prefix:
        """Under which hashes this group's blocks and tails of a prefix are found."""
        if self.num_ahead or self.block_size != prefix.hash_block_size:
            return GroupPrefix(prefix, self.block_size, self.num_ahead)
        return prefix

    # ---- what differs between kinds ------------------------------------------------------------

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens at the front no later step reads."""
        return 0

    @abstractmethod
    def find_longest_hit(self, prefix: Prefix, max_tokens: int) -> GroupHit:
        """See `HitSource`."""

    def find_tail(
        self, prefix: Prefix, num_blocks: int, max_tokens: int
    ) -> tuple[int, KVCacheBlock] | None:
        """`(num_tokens, block)` of the longest tail that follows `num_blocks` full blocks."""
        start = num_blocks * prefix.hash_block_size
        parent = prefix.prefix_parent(start)
        for length in self.pool.tail_lengths(parent, self.group_id):
            num_tokens = start + length
            if 0 < num_tokens <= max_tokens:
                block = self.pool.get_cached_block(prefix.prefix_hash(num_tokens), self.group_id)
                if block is not None:
                    return num_tokens, block
        return None

    def find_partial(
        self, prefix: Prefix, num_blocks: int, max_tokens: int
    ) -> tuple[int, KVCacheBlock] | None:
        """As `find_tail`; the first tokens of a full block will do as well."""
        start = num_blocks * self.block_size
        if not self.exact or max_tokens <= start:
            return None
        if num_blocks == max_tokens // self.block_size and num_blocks < len(prefix.block_hashes):
            block = self.pool.get_cached_block(prefix.block_hashes[num_blocks], self.group_id)
            if block is not None and block not in self._filling:
                return max_tokens, block
        return self.find_tail(prefix, num_blocks, max_tokens)

    # ---- a request's blocks --------------------------------------------------------------------

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        return self.req_to_blocks.get(request_id, [])

    def last_block(self, request_id: str) -> KVCacheBlock | None:
        blocks = self.req_to_blocks.get(request_id)
        return blocks[-1] if blocks else None

    def is_current(self, found: Sequence[KVCacheBlock], prefix: Prefix) -> bool:
        """Whether blocks found earlier still hold what they were found for."""
        block_hashes = self.keys(prefix).block_hashes
        return all(
            block.is_null
            or block.block_hash == make_block_hash_with_group_id(block_hash, self.group_id)
            for block, block_hash in zip(found, block_hashes, strict=False)
        )

    def holds(self, source: KVCacheBlock, prefix: Prefix, num_tokens: int) -> bool:
        """Whether a block still holds the end of a prefix, full block or tail."""
        prefix = self.keys(prefix)
        keys = [prefix.prefix_hash(num_tokens)]
        index = num_tokens // self.block_size
        if index < len(prefix.block_hashes) and source not in self._filling:
            keys.append(prefix.block_hashes[index])
        return any(self.pool.get_cached_block(key, self.group_id) is source for key in keys)

    def cache_tail(self, prefix: Prefix, block: KVCacheBlock, num_tokens: int) -> bool:
        """Let the cache continue from `block` after `num_tokens` tokens; False if it can already,
        or the tokens that the block depends on are not known."""
        prefix = self.keys(prefix)
        if num_tokens > prefix.num_tokens:
            return False
        return self.pool.cache_tail(
            block,
            prefix.prefix_hash(num_tokens),
            prefix.prefix_parent(num_tokens),
            num_tokens % prefix.hash_block_size,
        )

    def block_at(self, request_id: str, num_tokens: int) -> KVCacheBlock | None:
        """The partly filled block that ends a prefix; None at a block boundary."""
        if num_tokens % self.block_size == 0:
            return None
        block = self.req_to_blocks[request_id][num_tokens // self.block_size]
        return None if block.is_null else block

    def clip(self, blocks: Sequence[KVCacheBlock], num_computed_tokens: int) -> list[KVCacheBlock]:
        """`blocks` of a prefix, with null blocks where nothing will be read."""
        skipped = self._num_skipped_blocks(num_computed_tokens)
        null = self.pool.null_block
        return [null if i < skipped else block for i, block in enumerate(blocks)]

    def quiet_until(self, request_id: str, num_computed_tokens: int, hash_lag: int | None) -> int:
        """While fewer tokens than this are computed, one more needs no new block here, slides none
        out of a window and completes none to be hashed. A full block's hash is known `hash_lag`
        steps after the one that computes its last token; None: no block is hashed."""
        quiet = len(self.req_to_blocks[request_id]) * self.block_size
        if hash_lag is not None:
            full = (self._num_hashed[request_id] + 1) * self.block_size
            quiet = min(quiet, full - 1 + hash_lag)
        return quiet

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

    def cache(self, request_id: str, prefix: Prefix, num_tokens: int) -> None:
        """Let the cache find the full blocks of the first `num_tokens` tokens."""
        num_hashed = self._num_hashed[request_id]
        if num_tokens < (num_hashed + 1) * self.block_size:
            return
        block_hashes = self.keys(prefix).block_hashes
        blocks = self.req_to_blocks[request_id]
        num_full = min(num_tokens // self.block_size, len(block_hashes), len(blocks))
        for i in range(num_hashed, num_full):
            if not blocks[i].is_null:
                self.pool.cache_block(blocks[i], block_hashes[i])
                self._filling.add(blocks[i])
        self._num_hashed[request_id] = max(num_hashed, num_full)

    def end_step(self) -> None:
        """A step has been scheduled: what it fills is complete for later ones."""
        self._filling.clear()

    def rewind(self, request_id: str, num_computed_tokens: int) -> None:
        """The tokens from here on will be computed (and their blocks hashed) again."""
        if request_id in self._num_hashed:
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

    def find_longest_hit(self, prefix: Prefix, max_tokens: int) -> GroupHit:
        prefix = self.keys(prefix)
        max_tokens = min(max_tokens, max(prefix.num_tokens, 0))
        block_hashes = prefix.block_hashes[: max_tokens // self.block_size]
        found = self.pool.get_cached_run(block_hashes, self.group_id)
        partial = self.find_partial(prefix, len(found), max_tokens)
        if partial is not None:
            return GroupHit(partial[0], found, partial[1])
        return GroupHit(len(found) * self.block_size, found)


class SlidingWindowManager(SingleTypeKVCacheManager):
    """The last `window` tokens are kept; a hit needs only the blocks its next token can see."""

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.window + 1, 0)

    def quiet_until(self, request_id: str, num_computed_tokens: int, hash_lag: int | None) -> int:
        skipped = self._num_skipped_blocks(num_computed_tokens)
        next_skip = (skipped + 1) * self.block_size + self.window - 1
        return min(super().quiet_until(request_id, num_computed_tokens, hash_lag), next_skip)

    def find_longest_hit(self, prefix: Prefix, max_tokens: int) -> GroupHit:
        prefix = self.keys(prefix)
        max_tokens = min(max_tokens, max(prefix.num_tokens, 0))
        hashes = prefix.block_hashes[: max_tokens // self.block_size]
        blocks = [self.pool.get_cached_block(h, self.group_id) for h in hashes]
        #: runs[i]: cached blocks in a row before block i
        runs = [0]
        for block in blocks:
            runs.append(0 if block is None else runs[-1] + 1)
        for end in range(len(blocks), -1, -1):
            for num_tokens, source in self._ends(prefix, end, max_tokens):
                skipped = self._num_skipped_blocks(num_tokens)
                if num_tokens and runs[end] >= end - skipped:
                    nulls = [self.pool.null_block] * skipped
                    kept = [block for block in blocks[skipped:end] if block is not None]
                    return GroupHit(num_tokens, nulls + kept, source)
        return GroupHit(0, [])

    def _ends(
        self, prefix: Prefix, num_blocks: int, max_tokens: int
    ) -> Iterator[tuple[int, KVCacheBlock | None]]:
        """Where a hit that shares `num_blocks` blocks can end, the longest first."""
        partial = self.find_partial(prefix, num_blocks, max_tokens)
        if partial is not None:
            yield partial
        yield num_blocks * self.block_size, None


class RecurrentManager(SingleTypeKVCacheManager):
    """One running state for the request's life, plus `num_speculative_blocks` for draft tokens.

    A recurrent state exists at one token count only, so a hit needs a *checkpoint*: a block that
    holds a copy of the state (or a state its request left behind) at that count.
    """

    def keys(self, prefix: Prefix) -> Prefix:
        """A state belongs to no block: it is found after any number of hashed blocks."""
        return prefix

    def cache(self, request_id: str, prefix: Prefix, num_tokens: int) -> None:
        """The running state changes every step: there is nothing a hash could name."""

    def quiet_until(self, request_id: str, num_computed_tokens: int, hash_lag: int | None) -> int:
        return sys.maxsize

    def block_at(self, request_id: str, num_tokens: int) -> KVCacheBlock | None:
        """The running state."""
        return self.req_to_blocks[request_id][0]

    def holds(self, source: KVCacheBlock, prefix: Prefix, num_tokens: int) -> bool:
        key = prefix.prefix_hash(num_tokens)
        return self.pool.get_cached_block(key, self.group_id) is source

    def find_longest_hit(self, prefix: Prefix, max_tokens: int) -> GroupHit:
        num_full = max_tokens // prefix.hash_block_size
        parents = [prefix.prefix_parent(0), *prefix.block_hashes[:num_full]]
        for num_blocks in self.pool.followed_by_tails(parents, self.group_id):
            tail = self.find_tail(prefix, num_blocks, max_tokens)
            if tail is not None:
                return GroupHit(tail[0], [], tail[1])
        return GroupHit(0, [])


#: `KVCacheSpec.kind` -> who manages the blocks of such groups
MANAGERS: dict[str, type[SingleTypeKVCacheManager]] = {
    "full_attention": FullAttentionManager,
    "mla_attention": FullAttentionManager,
    "hidden_states": FullAttentionManager,
    "sliding_window": SlidingWindowManager,
    "mamba": RecurrentManager,
}


def get_manager(
    spec: KVCacheSpec, group_id: int, pool: BlockPool, exact: bool = False
) -> SingleTypeKVCacheManager:
    """The manager of a group; `ValueError` for a kind of state the arena cannot keep."""
    if spec.kind not in MANAGERS:
        raise ValueError(f"no cache manager for {type(spec).__name__} ({spec.kind})")
    return MANAGERS[spec.kind](spec, group_id, pool, exact)
