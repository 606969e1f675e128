# SPDX-License-Identifier: Apache-2.0
"""One arena for several placements of a supernet: what each keeps, and nothing for other mixers.

Each placement has groups of its own, as if it were the only one, so a request takes blocks for the
layers that it uses. Pages are lent to groups, whichever placement they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.arena_planner import fit_in_page, plan_arena
from vllm.v1.core.arena_sizing import (
    check_fits,
    check_same_layers,
    config_of,
    filled,
    max_len_that_fits,
    num_pages_for,
    record_plan,
)
from vllm.v1.core.state_groups import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    PlacementGroups,
)

#: a placement, its mixers joined by commas, and what its layers keep
PlacementSpecs = tuple[str, dict[str, KVCacheSpec]]


class BesideArena(NamedTuple):
    """Bytes of one worker that are counted with its arena, because a change of the placement moves
    them from one to the other: journals, and weights of mixers; the latter only where the arena is
    what weights leave."""

    journals: int = 0
    mixers: int = 0


def placed_config(
    vllm_config: VllmConfig, placed: Sequence[PlacementSpecs], num_pages: int
) -> KVCacheConfig:
    """An arena of `num_pages` pages for these placements."""
    groups: list[KVCacheGroupSpec] = []
    placements: list[PlacementGroups] = []
    for placement, specs in placed:
        own = get_kv_cache_groups(vllm_config, specs)
        placements.append(PlacementGroups(placement, len(groups), len(own)))
        groups += own
    return replace(config_of(groups, plan_arena(groups, num_pages)), placements=placements)


def get_placed_configs(
    vllm_config: VllmConfig,
    placed_per_worker: Sequence[Sequence[PlacementSpecs]],
    available_bytes_per_worker: Sequence[int],
) -> list[KVCacheConfig]:
    """As `get_kv_cache_configs`, for all these placements.

    `ValueError` if the workers' layers differ, or if a request of `max_model_len` of any placement
    does not fit, naming the placement.
    """
    first = placed_per_worker[0]
    for i in range(len(first)):
        check_same_layers([placed[i][1] for placed in placed_per_worker])
    config = placed_config(vllm_config, first, 1)
    page_bytes = config.plan.page_bytes
    num_pages = num_pages_for(vllm_config, page_bytes, min(available_bytes_per_worker))
    plan = replace(config.plan, num_pages=num_pages)
    config = replace(config_of(config.kv_cache_groups, plan), placements=config.placements)
    for i, placed in enumerate(config.placements):
        own = config.of_placement(i)
        try:
            check_fits(vllm_config, own.kv_cache_groups, own.plan)
        except ValueError as error:
            if len(first) == 1:
                raise
            raise VLLMValidationError(f"{placed.placement}: {error}") from None
    record_plan(config)
    return [config for _ in placed_per_worker]


def with_placement(
    vllm_config: VllmConfig,
    config: KVCacheConfig,
    index: int,
    placed: PlacementSpecs,
    first_group: int,
) -> KVCacheConfig:
    """The same arena with another placement: its groups are those from `first_group` on, in the
    place of what was there, or behind all others. The pages stay as they are.

    `ValueError` if a block of a group is larger than a page, or if a request of `max_model_len`
    does not fit.
    """
    placement, specs = placed
    own = get_kv_cache_groups(vllm_config, specs)
    plan = replace(config.plan, groups=fit_in_page(own, config.plan.page_bytes))
    check_fits(vllm_config, own, plan)
    end = first_group + len(own)
    groups = [*config.kv_cache_groups[:first_group], *own, *config.kv_cache_groups[end:]]
    plans = (*config.plan.groups[:first_group], *plan.groups, *config.plan.groups[end:])
    whole = replace(config.plan, groups=plans)
    placements = list(config.placements)
    placements[index : index + 1] = [PlacementGroups(placement, first_group, len(own))]
    return replace(config_of(groups, whole), placements=placements)


def estimate_placed_max_model_len(
    vllm_config: VllmConfig, placed: Sequence[PlacementSpecs], available_bytes: int
) -> int:
    """As `estimate_max_model_len`: the longest request that fits whatever its placement."""
    config = placed_config(vllm_config, placed, 1)
    config = replace(config, plan=filled(vllm_config, config.plan, available_bytes))
    parts = [config.of_placement(i) for i in range(len(placed))]
    return min(max_len_that_fits(vllm_config, part.kv_cache_groups, part.plan) for part in parts)
