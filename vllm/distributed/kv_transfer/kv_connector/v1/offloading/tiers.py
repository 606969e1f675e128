# SPDX-License-Identifier: Apache-2.0
"""What host memory and files hold, as a second prefix cache.

Each tier is a `BlockPool` over an arena plan of its own size: blocks have the names and the tails
of the device's cache, and the managers of the groups search them with the same code. So a prefix
can be restored exactly where the device could have continued it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.eviction import EvictionPolicy
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    Tail,
    get_block_hash,
    get_group_id,
)
from vllm.v1.core.prefix_lookup import PrefixLookup, PrefixMatch
from vllm.v1.core.single_type_kv_cache_manager import get_manager
from vllm.v1.kv_cache_interface import ArenaPlan, KVCacheConfig
from vllm.v1.request import Request


class Tier(BlockPool):
    """One kind of memory, `num_pages` pages large. A block holds one content."""

    def __init__(
        self, plan: ArenaPlan, num_pages: int, policy: EvictionPolicy | None = None
    ) -> None:
        self.plan = replace(plan, num_pages=num_pages + 1)  # page 0 is the null page
        self._policy = EvictionPolicy() if policy is None else policy
        super().__init__(self.plan, self._policy.make_pages)
        self.observers.append(self._policy)

    def owns(self, block: KVCacheBlock) -> bool:
        """Whether the block is of this tier."""
        return self.pages.find_block(block.group_id, block.block_id) is block

    def block_of(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The block that holds this content."""
        return self._cached.get(key)

    def take(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """A held block for content that the tier does not have; None if all are in use."""
        group_id = get_group_id(key)
        demands = [int(group.group_id == group_id) for group in self.pages.groups]
        if not self.can_allocate(demands):
            return None
        self._policy.wanted(key)
        return self.get_new_blocks(demands, [None] * len(demands))[group_id][0]

    def publish(self, block: KVCacheBlock, key: BlockHashWithGroupId, tail: Tail | None) -> None:
        """Let look-ups find what a held block contains, unless another block has the same."""
        if tail is None:
            self.cache_block(block, get_block_hash(key))
        else:
            parent = get_block_hash(tail.parent)
            self.cache_tail(block, get_block_hash(key), parent, tail.length)

    def refresh(self, blocks: Sequence[KVCacheBlock]) -> None:
        """What blocks hold was found: they are the most recently used ones."""
        for block in blocks:
            self._policy.used(block)
        self.pages.refresh(blocks)

    def reset_prefix_cache(self, held_too: bool = False) -> bool:
        done = super().reset_prefix_cache(held_too)
        if done:
            self._policy.reset()
        return done

    @property
    def used_bytes(self) -> float:
        """Bytes of blocks that hold something, each counted with its stride."""
        groups = self.pages.groups
        return sum(
            (group.live + len(group.idle)) * self.plan.block_stride(g)
            for g, group in enumerate(groups)
        )


class _Both(Tier):
    """What either of two tiers holds; has no memory of its own."""

    def __init__(self, first: Tier, second: Tier) -> None:
        super().__init__(first.plan, 0)
        self._tiers = first, second

    def get_cached_block(self, block_hash: BlockHash, group_id: int) -> KVCacheBlock | None:
        first, second = self._tiers
        found = first.get_cached_block(block_hash, group_id)
        return second.get_cached_block(block_hash, group_id) if found is None else found

    def get_cached_run(
        self, block_hashes: Iterable[BlockHash], group_id: int
    ) -> list[KVCacheBlock]:
        found: list[KVCacheBlock] = []
        for block_hash in block_hashes:
            block = self.get_cached_block(block_hash, group_id)
            if block is None:
                break
            found.append(block)
        return found

    def tail_lengths(self, parent: BlockHash, group_id: int) -> list[int]:
        lengths = {n for tier in self._tiers for n in tier.tail_lengths(parent, group_id)}
        return sorted(lengths, reverse=True)

    def followed_by_tails(self, parents: Sequence[BlockHash], group_id: int) -> Iterator[int]:
        found = {n for tier in self._tiers for n in tier.followed_by_tails(parents, group_id)}
        yield from sorted(found, reverse=True)


class TierSearch:
    """Looks prefixes up in host memory and, if there is one, in the tier behind it."""

    def __init__(self, config: KVCacheConfig, host: Tier, files: Tier | None) -> None:
        self._host_only = _lookup(config, host)
        self._all = self._host_only if files is None else _lookup(config, _Both(host, files))

    def find(self, request: Request, host_only: bool = False) -> PrefixMatch:
        """The longest prefix that every group can continue; never covers the last token."""
        return (self._host_only if host_only else self._all).search(request)


def _lookup(config: KVCacheConfig, pool: BlockPool) -> PrefixLookup:
    exact = config.has_mamba_layers
    managers = [
        get_manager(group.kv_cache_spec, group_id, pool, exact=exact)
        for group_id, group in enumerate(config.kv_cache_groups)
    ]
    return PrefixLookup(managers, pool)
