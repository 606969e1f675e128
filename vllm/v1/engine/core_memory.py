# SPDX-License-Identifier: Apache-2.0
"""State memory as the engine core sees it: what workers have room for, and what fits into it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import decisions
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    estimate_max_model_len,
    get_kv_cache_capacity,
    get_kv_cache_configs,
)
from vllm.v1.core.placed_arena import (
    BesideArena,
    PlacementSpecs,
    estimate_placed_max_model_len,
    get_placed_configs,
)
from vllm.v1.core.staged_arena import (
    estimate_staged_max_model_len,
    get_stage_configs,
    whole_config,
)
from vllm.v1.engine.joint_steps import JointSteps
from vllm.v1.engine.placements import MemorySize
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = init_logger(__name__)


class CoreMemory:
    """Plans the workers' arenas in the bytes that they have for them.

    What arena, journals and weights of mixers take together at the start is what they may take
    later: a placement whose journals or mixers take more has a smaller arena.
    """

    def __init__(self, vllm_config: VllmConfig, executor: Executor) -> None:
        self._vllm_config = vllm_config
        self._executor = executor
        #: per worker, at the start: the arena's, and what is beside it
        self._available_bytes: list[int] = []
        self._beside: list[BesideArena] = []

    def allocate(self, joint: JointSteps | None) -> KVCacheConfig:
        """Give all workers their memory, once; returns what the scheduler works with.

        `ValueError` if a request of full length does not fit.
        """
        specs, placed = self._executor.get_kv_cache_specs(), self._executor.get_placed_specs()
        self._available_bytes = self._executor.determine_available_memory()
        if joint is not None:
            # Equal memory, so that all capture graphs of the same sizes.
            least = joint.least(min(self._available_bytes))
            self._available_bytes = [least] * len(self._available_bytes)
            joint.begin()
        self._beside = self._executor.get_bytes_beside()
        if self._vllm_config.model_config.max_model_len_auto:
            self._fit_max_model_len(specs, placed[0])
        configs = self._planned(specs, placed, self._available_bytes)
        whole = whole_config(self._vllm_config, configs)
        self.adopt(whole)
        self._executor.initialize_from_config(configs)
        return whole

    def plan(
        self,
        specs: Sequence[dict[str, KVCacheSpec]],
        placed: Sequence[Sequence[PlacementSpecs]],
        beside: Sequence[BesideArena],
    ) -> list[KVCacheConfig]:
        """Each worker's next memory, from what its layers keep, or what they keep in each placement
        if there are any, and what is beside the arena; `ValueError` if a request of full length
        does not fit."""
        extra = [sum(new) - sum(old) for new, old in zip(beside, self._beside, strict=True)]
        available = [size - more for size, more in zip(self._available_bytes, extra, strict=True)]
        try:
            return self._planned(specs, placed, available)
        except ValueError as error:
            if max(extra) <= 0:
                raise
            worker = extra.index(max(extra))
            why = self._why_less(beside[worker], self._beside[worker], worker)
            raise VLLMValidationError(f"{error} {why}") from None

    def _why_less(self, beside: BesideArena, before: BesideArena, worker: int) -> str:
        if beside.mixers - before.mixers > beside.journals - before.journals:
            whole = self._available_bytes[worker] + before.mixers
            return (
                f"Weights of its mixers take {beside.mixers} of the {whole} bytes that arena and "
                f"mixers have together ({before.mixers} at the start)"
            )
        whole = self._available_bytes[worker] + before.journals
        return (
            f"Journals of its recurrent layers take {beside.journals} of the {whole} bytes that "
            f"arena and journals have together ({before.journals} at the start): lower "
            "--max-num-seqs or --deferred-commit-tokens"
        )

    def _planned(
        self,
        specs: Sequence[dict[str, KVCacheSpec]],
        placed: Sequence[Sequence[PlacementSpecs]],
        available_bytes: Sequence[int],
    ) -> list[KVCacheConfig]:
        if placed[0]:
            return get_placed_configs(self._vllm_config, placed, available_bytes)
        if self._vllm_config.parallel_config.pipeline_parallel_size > 1:
            return get_stage_configs(self._vllm_config, specs, available_bytes)
        return get_kv_cache_configs(self._vllm_config, specs, available_bytes)

    def adopt(self, config: KVCacheConfig, placement: int = 0) -> None:
        """Work out how much the workers' memory holds, of requests of one placement."""
        cache = self._vllm_config.cache_config
        cache.num_gpu_blocks = config.num_blocks
        config = config.of_placement(placement)
        if config.kv_cache_groups:
            tokens, full_length = get_kv_cache_capacity(self._vllm_config, config)
            cache.capacity_tokens = tokens = tokens - tokens % cache.block_size
            logger.info("state memory: %d tokens, %.1f full-length requests", tokens, full_length)

    def size(self) -> MemorySize:
        """What was adopted last."""
        cache = self._vllm_config.cache_config
        return MemorySize(cache.num_gpu_blocks, cache.capacity_tokens)

    def _fit_max_model_len(
        self, specs: Sequence[dict[str, KVCacheSpec]], placed: Sequence[PlacementSpecs]
    ) -> None:
        model, scheduler = self._vllm_config.model_config, self._vllm_config.scheduler_config
        available = min(self._available_bytes)
        if placed:
            fits = estimate_placed_max_model_len(self._vllm_config, placed, available)
        elif self._vllm_config.parallel_config.pipeline_parallel_size > 1:
            fits = estimate_staged_max_model_len(self._vllm_config, specs, self._available_bytes)
        else:
            fits = estimate_max_model_len(self._vllm_config, specs[0], available)
        if 0 < fits < model.max_model_len:
            decisions.record(
                "max_model_len", fits, "the longest request memory holds", model.max_model_len
            )
            model.max_model_len = scheduler.max_model_len = fits
