# SPDX-License-Identifier: Apache-2.0
"""The state memory of all placements that requests choose from: one pool, a manager for each."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.pinned_prefixes import PinnedPrefixes
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request


class PlacementCaches(dict[int, KVCacheManager]):
    """The managers by placement, who ran longest ago first; one, at 0, where none is chosen."""

    def __init__(self, vllm_config: VllmConfig, config: KVCacheConfig) -> None:
        super().__init__()
        self._vllm_config = vllm_config
        self._config = config
        self._pool = BlockPool(config.plan)
        self._pins = PinnedPrefixes(self._pool)
        for placement, first in enumerate([placed.first for placed in config.placements] or [0]):
            self._add(placement, first)

    def _add(self, placement: int, first_group: int) -> None:
        vllm_config, events = self._vllm_config, self._vllm_config.kv_events_config
        self[placement] = KVCacheManager(
            self._config.of_placement(placement),
            vllm_config.model_config.max_model_len,
            max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            enable_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            watermark=vllm_config.scheduler_config.watermark,
            checkpoint_interval=vllm_config.cache_config.checkpoint_interval,
            sanitize=vllm_config.cache_config.sanitize,
            enable_kv_cache_events=events is not None and events.enable_kv_cache_events,
            pool=self._pool,
            pins=self._pins,
            first_group=first_group,
        )

    def set_placement(self, placement: int, config: KVCacheConfig) -> None:
        """Make a place for a further placement, or one in the place of a retired one; `config` has
        it, and is otherwise as before."""
        self._config = config
        first = config.placements[placement].first
        groups = config.of_placement(placement).plan.groups
        self._pool.pages.set_groups(first, [group.blocks_per_page for group in groups])
        self._add(placement, first)

    def forget(self, placement: int) -> bool:
        """Forget what is cached of a placement; False, and only its pins have ended, while requests
        hold blocks of it."""
        self[placement].begin_step()
        placed = self._config.placements[placement]
        self._pins.release_groups(range(placed.first, placed.first + placed.count))
        return self._pool.forget_groups(placed.first, placed.count)

    def reset_prefix_cache(self, finished: Sequence[Request] = ()) -> bool:
        """`KVCacheManager.reset_prefix_cache` of each, with those `finished` that are its own."""
        for cache in self.values():
            cache.begin_step()
        done = [
            cache.reset_prefix_cache([one for one in finished if one.placement == placement])
            for placement, cache in self.items()
        ]
        return all(done)
