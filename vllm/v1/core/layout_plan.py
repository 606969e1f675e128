# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a layout would hold and do, by the same steps as an engine's start.

The configuration is resolved, each stage's first rank built on the `meta` device, and the arenas
planned: what a start refuses is refused here, in the same words.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_transfer_state import connector_device_bytes
from vllm.engine.resolve import resolve
from vllm.model_executor.decode_work import decode_work, num_layers, step_collectives
from vllm.model_executor.model_outline import (
    ModelOutline,
    common_outline,
    models_on_meta,
    other_outlines,
    outline_of,
)
from vllm.model_executor.models.interfaces import as_stage
from vllm.platforms import current_platform
from vllm.v1.core.explain_request import cost_of_request
from vllm.v1.core.layout_cost import Layout, StageWork
from vllm.v1.core.placed_arena import get_placed_configs
from vllm.v1.core.staged_arena import get_stage_configs, whole_config
from vllm.v1.kv_cache_interface import KVCacheConfig

#: of a sampled token id
_TOKEN_BYTES = 8
#: memory for an arena whose pages are given
_ENOUGH_BYTES = 1 << 62


@dataclass(frozen=True)
class PlannedStage:
    """What one rank holds and does. `outlines`: of the model's own placement, then of others that
    requests may choose; `outline`: the first one, with what all of them need in common."""

    outlines: list[ModelOutline]
    outline: ModelOutline
    work: StageWork
    layers: int


@dataclass(frozen=True)
class LayoutPlan:
    """A replica. Of each stage: what its ranks do, and where their bytes go, the arena's being
    those it has, or would have if it were not `too_large`; then there are no `arenas`."""

    config: VllmConfig
    layout: Layout
    stages: list[PlannedStage]
    memories: list[Memory]
    arenas: list[KVCacheConfig]
    too_large: str = ""

    @property
    def whole(self) -> KVCacheConfig:
        """All stages' arenas as the scheduler sees them, for the model's own placement."""
        if self.layout.pp == 1:
            return self.arenas[0].of_placement(0)
        return whole_config(self.config, self.arenas, workers_per_stage=1)

    def sequences(self, context: int) -> int:
        """Requests of `context` tokens that fit at once, with the model's own placement."""
        whole, batched = self.whole, self.config.scheduler_config.max_num_batched_tokens
        plan = whole.plan
        arena_bytes = plan.num_pages * plan.page_bytes
        cost = cost_of_request(whole.kv_cache_groups, plan, batched, context, arena_bytes)
        return cost.sequences


def plan_layout(vllm_config: VllmConfig, layout: Layout, budget: Budget) -> LayoutPlan:
    """The plan for `vllm_config` with its parallel sizes replaced; ValueError with what an engine
    of that layout would refuse before it looks at its memory."""
    pages = _given_pages(vllm_config, budget)
    cache = {"num_gpu_blocks": None, "num_gpu_blocks_override": pages}
    config = with_changes(vllm_config, cache=cache, parallel=layout.flags)
    with config.decisions.current():
        if layout.ep and layout.pp > 1:
            models_on_meta(config)  # refuses one without experts, which a stage may be
        stages = [_stage(config, layout, stage) for stage in range(layout.pp)]
        memories = [memory_of(config, budget, stage.outline, 0) for stage in stages]
        available = [_ENOUGH_BYTES if pages else memory.arena_bytes for memory in memories]
        try:
            arenas = _arenas(config, layout, stages, available)
        except ValueError as error:
            return LayoutPlan(config, layout, stages, memories, [], str(error))
    sized = [
        replace(memory, arena_bytes=arena.plan.num_pages * arena.plan.page_bytes)
        for memory, arena in zip(memories, arenas, strict=True)
    ]
    return LayoutPlan(config, layout, stages, sized, arenas)


def _given_pages(vllm_config: VllmConfig, budget: Budget) -> int | None:
    """Pages of one replica's arena, where the configuration says so and no memory is given."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if budget.arena_bytes is not None or budget.device_bytes is not None:
        return None
    if cache.num_gpu_blocks:
        return cache.num_gpu_blocks // parallel.data_parallel_size
    return cache.num_gpu_blocks_override


def _stage(config: VllmConfig, layout: Layout, stage: int) -> PlannedStage:
    built, models = models_on_meta(config, layout.tp, stage)
    model, is_last = models[0], stage == layout.pp - 1
    element_bytes = config.model_config.dtype.itemsize
    collectives = step_collectives(model, element_bytes, is_first=stage == 0, is_last=is_last)
    streams = 0 if is_last else as_stage(model).stage_streams()[1]
    work = StageWork(
        decode_work(built, model, makes_logits=is_last),
        collectives,
        stream_bytes=streams * config.model_config.get_hidden_size() * element_bytes,
        sample_bytes=_TOKEN_BYTES * (layout.pp - 1) if is_last else 0,
    )
    own = outline_of(built, models)
    outlines = [own, *other_outlines(config, layout.tp, own)]
    return PlannedStage(outlines, common_outline(config, outlines), work, num_layers(model))


def _arenas(
    config: VllmConfig, layout: Layout, stages: Sequence[PlannedStage], available: Sequence[int]
) -> list[KVCacheConfig]:
    """Each stage's, as an engine plans it; ValueError if a request of full length does not fit."""
    if layout.pp == 1:
        placed = [(one.placement, dict(one.specs)) for one in stages[0].outlines]
        return get_placed_configs(config, [placed], available)
    specs = [dict(stage.outline.specs) for stage in stages for _ in range(layout.tp)]
    per_worker = [size for size in available for _ in range(layout.tp)]
    return get_stage_configs(config, specs, per_worker)[:: layout.tp]


def with_changes(
    config: VllmConfig,
    cache: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
) -> VllmConfig:
    """The configuration with these fields of its cache or parallel configuration; ValueError if
    that is refused. The original, its decisions and the log are left alone."""
    changed = copy.copy(config)
    changed.decisions = copy.deepcopy(config.decisions)
    changed.decisions.is_logged = False
    changed.cache_config = replace(config.cache_config, **(cache or {}))
    changed.parallel_config = replace(config.parallel_config, **(parallel or {}))
    changed.scheduler_config = copy.copy(config.scheduler_config)
    changed.compilation_config = copy.copy(config.compilation_config)
    return resolve(changed)


@dataclass(frozen=True)
class Budget:
    """Memory to plan for, in bytes: that of the arena, or that of the device.

    A device's is shared by weights, `reserved_bytes` (activations and driver, which an engine
    measures at its start), the memory of a KV connector and the arena. Nothing given: what an
    engine here would use.
    """

    arena_bytes: int | None = None
    device_bytes: int | None = None
    reserved_bytes: int = 0


@dataclass(frozen=True)
class Memory:
    """Where the arena's bytes come from: `source` in words; device figures where they are known.
    `host_bytes`: weights that wait in host memory."""

    source: str
    arena_bytes: int
    weight_bytes: int
    device_bytes: int | None = None
    reserved_bytes: int | None = None
    #: of a device: uncommitted tokens of running requests (docs/state_memory.md)
    ring_bytes: int = 0
    host_bytes: int = 0


def memory_of(
    vllm_config: VllmConfig, budget: Budget, outline: ModelOutline, page_bytes: int
) -> Memory:
    """The given budget before the configured pages before what an engine here would take."""
    memory = _divided(vllm_config, budget, outline, page_bytes)
    return replace(memory, host_bytes=outline.host_bytes)


def _divided(
    vllm_config: VllmConfig, budget: Budget, outline: ModelOutline, page_bytes: int
) -> Memory:
    cache, weights = vllm_config.cache_config, outline.weight_bytes
    if budget.arena_bytes is not None:
        return Memory("given", budget.arena_bytes, weights)
    device, reserved = budget.device_bytes, budget.reserved_bytes
    if device is None:
        pages = cache.num_gpu_blocks or cache.num_gpu_blocks_override
        if pages is not None:
            source = "the engine's pages" if cache.num_gpu_blocks else "--num-gpu-blocks-override"
            return Memory(source, pages * page_bytes, weights)
        if cache.kv_cache_memory_bytes is not None:
            return Memory("--kv-cache-memory-bytes", cache.kv_cache_memory_bytes, weights)
        if vllm_config.device_config.device_type == "cpu":
            return Memory("VLLM_CPU_KVCACHE_SPACE", cache.cpu_kvcache_space_bytes, weights)
        device = current_platform.total_memory_bytes()
    reserved += connector_device_bytes(vllm_config)
    usable = int(device * cache.gpu_memory_utilization)
    source = f"{cache.gpu_memory_utilization:g} of the device, less weights and reserve"
    rings = outline.ring_bytes
    arena = max(usable - weights - rings - reserved, 0)
    return Memory(source, arena, weights, device, reserved, rings)
