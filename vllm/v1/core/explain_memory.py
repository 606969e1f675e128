# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a rank's arena come from: part of `vllm explain`."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.model_executor.model_outline import ModelOutline
from vllm.platforms import current_platform


@dataclass(frozen=True)
class Budget:
    """Memory to plan for, in bytes: that of the arena, or that of the device.

    A device's is shared by weights, `reserved_bytes` (activations and driver, which an engine
    measures at its start) and the arena. Nothing given: what an engine here would use.
    """

    arena_bytes: int | None = None
    device_bytes: int | None = None
    reserved_bytes: int = 0


@dataclass(frozen=True)
class Memory:
    """Where the arena's bytes come from: `source` in words; device figures where they are known."""

    source: str
    arena_bytes: int
    weight_bytes: int
    device_bytes: int | None = None
    reserved_bytes: int | None = None
    #: of a device: uncommitted tokens of running requests (docs/state_memory.md)
    ring_bytes: int = 0


def memory_of(
    vllm_config: VllmConfig, budget: Budget, outline: ModelOutline, page_bytes: int
) -> Memory:
    """The given budget before the configured pages before what an engine here would take."""
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
    usable = int(device * cache.gpu_memory_utilization)
    source = f"{cache.gpu_memory_utilization:g} of the device, less weights and reserve"
    rings = outline.ring_bytes
    arena = max(usable - weights - rings - reserved, 0)
    return Memory(source, arena, weights, device, reserved, rings)
