# SPDX-License-Identifier: Apache-2.0
"""The placements of a worker's supernet: what the engine core asks about them, and how it changes
them."""

from __future__ import annotations

import torch

from vllm.config import CacheConfig
from vllm.distributed.kv_transfer.kv_transfer_state import ConnectorSlot
from vllm.model_executor.placements import Placement
from vllm.platforms import current_platform
from vllm.v1.core.placed_arena import BesideArena, PlacementSpecs
from vllm.v1.core.sched.output import BlockOperation
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.warm_up import warm_up


class WorkerPlacements:
    """The part of a worker that the engine core's `CorePlacements` calls."""

    device: torch.device
    cache_config: CacheConfig
    model_runner: ModelRunner
    _connector_slot: ConnectorSlot

    # ---- what they need ------------------------------------------------------------------------

    def get_placement_specs(self, placement: Placement) -> dict[str, KVCacheSpec]:
        """What the layers that a placement uses would keep; `VLLMValidationError` for one that the
        model does not have."""
        self.model_runner.supernet()
        return self.model_runner.get_kv_cache_spec(placement)

    def get_placed_specs(self, placement: Placement | None) -> list[PlacementSpecs]:
        """See `Executor.get_placed_specs`."""
        runner = self.model_runner
        return [(name, runner.get_kv_cache_spec(name)) for name in runner.placements(placement)]

    def spell_placement(self, placement: Placement) -> str:
        """See `HasPlacements.spell`; `VLLMValidationError` for one that the model does not have."""
        return self.model_runner.supernet().spell(placement)

    def get_bytes_beside(self, placement: Placement | None) -> BesideArena:
        """See `Executor.get_bytes_beside`."""
        runner = self.model_runner
        journals = runner.journal_bytes(placement)
        if self.given_arena_bytes is not None:
            return BesideArena(journals)
        return BesideArena(journals, runner.mixers.num_bytes(runner.live_placements(placement)))

    @property
    def given_arena_bytes(self) -> int | None:
        """The arena's bytes as they are given, None where it has what weights leave."""
        cache = self.cache_config
        if cache.kv_cache_memory_bytes is None and self.device.type == "cpu":
            return cache.cpu_kvcache_space_bytes
        return cache.kv_cache_memory_bytes

    # ---- requests that choose ------------------------------------------------------------------

    def check_mixers(self, placement: Placement) -> None:
        """`VLLMValidationError` if there is no room for the weights of a further placement."""
        self.model_runner.mixers.check_room(placement, self.room_for_weights())

    def fetch_mixers(self, placement: Placement) -> None:
        """Bring the weights that a further placement needs to the device; raises as above."""
        self.model_runner.mixers.fetch_beside(placement, self.room_for_weights())

    def room_for_weights(self) -> int | None:
        """What `gpu_memory_utilization` leaves beside all that is on the device and what steps
        take; None on a CPU, where weights take the same memory wherever they are."""
        free = current_platform.free_memory_bytes(self.device)
        if free is None:
            return None
        total = current_platform.total_memory_bytes(self.device.index or 0)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        steps = max(self.model_runner.activation_bytes - kept, 0)
        return int(total * self.cache_config.gpu_memory_utilization) - (total - free) - steps

    def set_placement(
        self, index: int, config: KVCacheConfig, block_log: list[BlockOperation] | None
    ) -> bool:
        """See `ModelRunner.set_placement`."""
        return self.model_runner.set_placement(index, config, block_log)

    # ---- the engine's own ----------------------------------------------------------------------

    def apply_placement(self, placement: Placement, config: KVCacheConfig) -> dict[int, str]:
        """Use these mixers, with memory for them; no request is left. See `ModelRunner.place`, also
        for what an error leaves behind."""
        connector = self._connector_slot.connector
        if connector is not None:
            connector.leave_memory(config)
        placed = self.model_runner.place(placement, config)
        if connector is not None:
            connector.register_memory(self.model_runner.state_memory())
        return placed

    def warm_up_placement(self) -> None:
        """Capture the graphs, once all ranks have what `apply_placement` allocates."""
        if self.device.type == "cuda":
            warm_up(self.model_runner)

    def use_as_own(self, index: int) -> dict[int, str]:
        """Requests that do not choose have this placement from here on; returns its mixers."""
        self.model_runner.own_placement = index
        return self.get_layer_placements()

    def get_layer_placements(self) -> dict[int, str]:
        """A supernet's mixer of each layer that has several, for requests that do not choose."""
        self.model_runner.use_placement(self.model_runner.own_placement)
        return self.model_runner.supernet().get_layer_placements()

    def get_own_placement(self) -> str:
        """The same as `HasPlacements.spell` gives it."""
        return self.model_runner.supernet().spell(self.get_layer_placements())

    def get_mixer_names(self) -> tuple[str, ...]:
        """The mixers of a supernet's layers."""
        return self.model_runner.supernet().get_mixer_names()
