# SPDX-License-Identifier: Apache-2.0
"""One arena per pipeline stage, in which equal block ids name the state of the same tokens.

The scheduler knows one set of groups, pages and blocks: those of the whole model. Every stage has
as many pages as the others, and a group has as many blocks in a page of each, so a block id is
valid in all of them; the page's bytes are each stage's own, since each holds its own layers. A
group without layers on a stage is there by its place alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vllm.config import VllmConfig
from vllm.v1.core.arena_planner import ALIGNMENT, PageChoice, choose_page, group_plans, layer_layout
from vllm.v1.core.arena_sizing import (
    check_fits,
    check_same_layers,
    config_of,
    filled,
    max_len_that_fits,
    num_pages_for,
    pages_per_request,
    record_plan,
)
from vllm.v1.core.state_groups import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ArenaPlan,
    GroupPlan,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)


def get_stage_configs(
    vllm_config: VllmConfig,
    specs_per_worker: Sequence[dict[str, KVCacheSpec]],
    available_bytes_per_worker: Sequence[int],
) -> list[KVCacheConfig]:
    """As `get_kv_cache_configs`, for the workers of several pipeline stages, in the order of their
    ranks: as many pages as fit on the stage that holds fewest."""
    specs, available = _by_stage(vllm_config, specs_per_worker, available_bytes_per_worker)
    groups = _groups(vllm_config, specs)
    plans = _plan(vllm_config, groups, available)
    pages = [
        num_pages_for(vllm_config, plan.page_bytes, stage)
        for plan, stage in zip(plans, available, strict=True)
    ]
    scarcest = pages.index(min(pages))
    check_fits(vllm_config, groups[scarcest], replace(plans[scarcest], num_pages=min(pages)))
    configs = [
        config_of(own, replace(plan, num_pages=min(pages)))
        for own, plan in zip(groups, plans, strict=True)
    ]
    record_plan(whole_config(vllm_config, configs, workers_per_stage=1))
    size = vllm_config.parallel_config.tensor_parallel_size
    return [config for config in configs for _ in range(size)]


def estimate_staged_max_model_len(
    vllm_config: VllmConfig,
    specs_per_worker: Sequence[dict[str, KVCacheSpec]],
    available_bytes_per_worker: Sequence[int],
) -> int:
    """As `estimate_max_model_len`: the longest request that fits on every stage."""
    specs, available = _by_stage(vllm_config, specs_per_worker, available_bytes_per_worker)
    groups = _groups(vllm_config, specs)
    plans = _plan(vllm_config, groups, available)
    return min(
        max_len_that_fits(vllm_config, own, filled(vllm_config, plan, stage))
        for own, plan, stage in zip(groups, plans, available, strict=True)
    )


def whole_config(
    vllm_config: VllmConfig, configs: Sequence[KVCacheConfig], workers_per_stage: int | None = None
) -> KVCacheConfig:
    """What the scheduler works with: the only stage's configuration, or all stages' layers and the
    bytes of a page on all of them together. Offsets of layers are those in their own stage."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return configs[0]
    size = workers_per_stage or vllm_config.parallel_config.tensor_parallel_size
    stages = configs[::size]
    plans = [stage.plan for stage in stages]
    groups = [
        KVCacheGroupSpec([name for part in parts for name in part.layer_names], spec)
        for parts, spec in (
            (parts, parts[0].kv_cache_spec)
            for parts in zip(*(stage.kv_cache_groups for stage in stages), strict=True)
        )
    ]
    group_plans = tuple(
        GroupPlan(
            parts[0].blocks_per_page,
            sum(part.block_bytes for part in parts),
            {name: offset for part in parts for name, offset in part.layer_offsets.items()},
        )
        for parts in zip(*(plan.groups for plan in plans), strict=True)
    )
    page_bytes = sum(plan.page_bytes for plan in plans)
    tensors = [tensor for stage in stages for tensor in stage.kv_cache_tensors]
    plan = ArenaPlan(page_bytes, plans[0].num_pages, group_plans)
    return KVCacheConfig(plan.num_pages, tensors, groups, plan)


def _by_stage(
    vllm_config: VllmConfig,
    specs_per_worker: Sequence[dict[str, KVCacheSpec]],
    available_bytes_per_worker: Sequence[int],
) -> tuple[list[dict[str, KVCacheSpec]], list[int]]:
    """The layers and the bytes of each stage; `ValueError` if the workers of one differ."""
    size = vllm_config.parallel_config.tensor_parallel_size
    starts = range(0, len(specs_per_worker), size)
    for start in starts:
        check_same_layers(specs_per_worker[start : start + size])
    available = [min(available_bytes_per_worker[start : start + size]) for start in starts]
    return [specs_per_worker[start] for start in starts], available


def _groups(
    vllm_config: VllmConfig, specs: Sequence[dict[str, KVCacheSpec]]
) -> list[list[KVCacheGroupSpec]]:
    """Of each stage, all groups of the model, with the stage's own layers."""
    merged = {name: spec for stage in specs for name, spec in stage.items()}
    groups = get_kv_cache_groups(vllm_config, merged)
    return [
        [
            replace(group, layer_names=[name for name in group.layer_names if name in stage])
            for group in groups
        ]
        for stage in specs
    ]


def _plan(
    vllm_config: VllmConfig, groups: Sequence[Sequence[KVCacheGroupSpec]], available: Sequence[int]
) -> list[ArenaPlan]:
    """Each stage's page, for one page in all: with the blocks per page that let the scarcest stage
    hold most requests of full length, of those that suit one stage or the whole model."""
    if not groups[0]:
        return [ArenaPlan(ALIGNMENT, 1, ()) for _ in groups]
    sizes = [[layer_layout(group)[1] for group in stage] for stage in groups]
    whole = [sum(parts) for parts in zip(*sizes, strict=True)]
    choices = [choose_page([size or 1 for size in own]) for own in (whole, *sizes)]
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    longest = vllm_config.model_config.max_model_len

    def requests(plans: Sequence[ArenaPlan]) -> float:
        pages = min(stage // plan.page_bytes for plan, stage in zip(plans, available, strict=True))
        return pages / max(pages_per_request(groups[0], plans[0], batched, longest), 1)

    plans = [[_stage_plan(stage, choice) for stage in groups] for choice in choices]
    return max(plans, key=requests)


def _stage_plan(groups: Sequence[KVCacheGroupSpec], choice: PageChoice) -> ArenaPlan:
    """The smallest page of a stage that has these blocks of its layers."""
    unit = ALIGNMENT * math.lcm(*choice.blocks_per_page)
    plans = group_plans(groups, choice.blocks_per_page)
    needed = max(
        -(-plan.block_bytes // ALIGNMENT) * ALIGNMENT * plan.blocks_per_page for plan in plans
    )
    return ArenaPlan(max(-(-needed // unit), 1) * unit, 1, plans)
