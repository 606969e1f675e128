# SPDX-License-Identifier: Apache-2.0
"""One device's model with what it keeps: weights, state memory, and placements of a supernet.

`ModelRunner` runs its steps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import StateMemory
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models.interfaces import (
    HasPlacements,
    as_stage,
)
from vllm.model_executor.placements import (
    NO_SUPERNET,
    Placement,
    placement_error,
    why_one_at_a_time,
)
from vllm.model_executor.state_layers import collect_layers, hand_over_layers, layer_specs
from vllm.platforms import current_platform
from vllm.v1.attention.group_backend import group_backend
from vllm.v1.core.sched.output import BlockOperation
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, PlacementGroups
from vllm.v1.spec_decode.drafter import (
    Drafter,
    DrafterMemory,
    attach_drafter,
    create_drafter,
)
from vllm.v1.spec_decode.extract_hidden_states import HiddenStateCapture
from vllm.v1.spec_decode.weights_read import WeightsRead
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.input_batch import InputBatch
from vllm.v1.worker.journal_pool import (
    JournalCounts,
    JournalPool,
    count_journals,
    journal_bytes,
)
from vllm.v1.worker.mixer_weights import MixerWeights
from vllm.v1.worker.pipeline_stage import PipelineStage
from vllm.v1.worker.placed_state import PlacedState
from vllm.v1.worker.rehearsals import Rehearsals
from vllm.v1.worker.residual_tap import ResidualTap, ask_for_captured_streams
from vllm.v1.worker.sanitizer import Sanitizer
from vllm.v1.worker.staging import Uploads
from vllm.v1.worker.state_journals import StateJournals
from vllm.v1.worker.step_graphs import StepGraphs
from vllm.v1.worker.step_inputs import StepInputBuilder
from vllm.v1.worker.step_metadata import StateGroup, StepMetadata
from vllm.v1.worker.step_sampler import StepSampler


class ModelOnDevice:
    """The model, its drafter and its state arena, as they are built, filled, placed and dropped."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        assert vllm_config.model_config is not None
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.device = device
        scheduler = vllm_config.scheduler_config
        self.max_rows = scheduler.max_num_seqs
        self.max_tokens = scheduler.max_num_batched_tokens
        self.vocab_size = self.model_config.get_vocab_size()
        #: steps whose staged arrays may still be in use
        self.depth = vllm_config.steps_in_flight + 1
        #: tokens that a decode may have in a step, and the most
        self.widths = vllm_config.step_widths
        self.width = self.widths[-1]
        stages = vllm_config.parallel_config.pipeline_parallel_size
        self.batch = InputBatch(self.max_rows, self.widths, num_sets=stages)
        self.uploads = Uploads.create(device, self.depth)
        self.inputs = StepInputBuilder(
            self.max_rows,
            self.max_tokens,
            device,
            self.depth,
            self.uploads,
            self.width,
            self.model_config.max_model_len,
            vllm_config.ends_rows,
        )
        self.sampler = StepSampler(self.vocab_size, device, self.inputs.progress, num_sets=stages)
        #: every layer that keeps state, by name
        self.layers: dict[str, AttentionLayerBase] = {}
        self.groups: list[StateGroup] = []
        self.graphs = StepGraphs()
        self.model: nn.Module
        #: the model and what is built beside it
        self.models: list[nn.Module]
        #: the channels to other pipeline stages, None where there are none
        self.stage: PipelineStage | None = None
        #: whether this worker has the head: it makes logits and samples
        self.samples = get_pp_group().is_last_rank
        self.capture: HiddenStateCapture | None = None
        self.tap: ResidualTap
        self.mixers: MixerWeights
        #: what warm-up has run, at the start and after changes of placement
        self.rehearsals = Rehearsals()
        #: what a step takes at most beside weights and state, if that was measured
        self.activation_bytes = 0
        self.sanitizer: Sanitizer | None = None
        self.journals: StateJournals | None = None
        #: by placement; the attributes above are those of the one that `placement` names
        self.placed: dict[int, PlacedState] = {}
        self.placement = 0
        #: of requests that do not choose
        self.own_placement = 0
        #: all placements' journals
        self.journal_pool = JournalPool.create(vllm_config, device)
        self.drafter: Drafter[Any] | None = create_drafter(vllm_config, self.inputs.progress)

    # ---- start-up ------------------------------------------------------------------------------

    def build_model(self) -> None:
        """The model and its drafter on the device; the weights are not there yet."""
        loader = get_model_loader(self.vllm_config.load_config)
        self.model = loader.build_model(self.vllm_config, self.model_config)
        if self.samples:
            self.capture = HiddenStateCapture.create(self.vllm_config, self.device)
        self.models = [self.model, *([] if self.capture is None else [self.capture.model])]
        if self.drafter is not None:
            self.models += attach_drafter(self.drafter, self.model)
        self.tap = ResidualTap(self.model, [self.capture, self.drafter])
        self.mixers = MixerWeights(self.model, self.device)
        self.mixers.send(self.live_placements())
        if get_pp_group().world_size > 1:
            self.stage = self._join_pipeline()
        if self.samples:
            self.sampler.share_vocabulary(self.model)
        self._collect_layers()

    def weights_read(self) -> WeightsRead:
        """Per step, of the model and the drafter."""
        drafter = self.drafter
        if drafter is None:
            return WeightsRead.of(self.model, None, (0,), own_head=False)
        own = self.models[1 if self.capture is None else 2 :]
        own_head = drafter.settings.is_draft_model
        passes = [drafter.num_passes(num_drafts) for num_drafts in range(self.width)]
        return WeightsRead.of(self.model, next(iter(own), None), passes, own_head)

    def _join_pipeline(self) -> PipelineStage:
        """Meet the other stages; `VLLMValidationError` for a model that cannot be a stage."""
        stage = as_stage(self.model)
        if not self.samples:
            ask_for_captured_streams(self.vllm_config, self.model)
        config = self.model_config
        return PipelineStage(
            (self.inputs.max_tokens, config.get_hidden_size()),
            config.dtype,
            self.device,
            self.max_rows,
            self.vllm_config.steps_in_flight,
            *stage.stage_streams(),
        )

    def _collect_layers(self) -> None:
        """Of a supernet, only the layers that are in use keep state."""
        self.layers = collect_layers(self.vllm_config, *self.models)
        hand_over_layers(self.vllm_config, self.layers)

    def placements(self, placement: Placement | None = None) -> list[str]:
        """What requests choose from, mixers joined by commas: the engine's own placement (or this
        one, instead) before those with an alias. Nothing where they cannot choose."""
        model = self.model
        if not isinstance(model, HasPlacements) or not model.get_mixer_names():
            return []
        if why_one_at_a_time(self.vllm_config) is not None:
            return []
        own = model.get_layer_placements() if placement is None else placement
        aliases = self.model_config.placement_aliases.values()
        return list(dict.fromkeys(model.spell(one) for one in (own, *aliases)))

    def live_placements(self, placement: Placement | None = None) -> list[str]:
        """Those whose mixers have their weights on the device: `placements`, or where requests
        cannot choose the engine's own (or this one, instead)."""
        model = self.model
        if not isinstance(model, HasPlacements) or not model.get_mixer_names():
            return []
        own = model.get_layer_placements() if placement is None else placement
        return self.placements(placement) or [model.spell(own)]

    @torch.no_grad()
    def load_weights(self) -> None:
        """Fill the model's parameters; ValueError for a checkpoint that does not fit."""
        loader = get_model_loader(self.vllm_config.load_config)
        loader.fill(self.model, self.model_config)
        if self.drafter is not None:
            self.drafter.load_weights()

    def get_kv_cache_spec(self, placement: Placement | None = None) -> dict[str, KVCacheSpec]:
        """What the layers keep, by name; with `placement`, what a supernet's would."""
        layers = self.layers
        if placement is not None:
            layers = collect_layers(self.vllm_config, *self.models, placement=placement)
        return layer_specs(self.vllm_config, layers)

    def journal_bytes(self, placement: Placement | None = None) -> int:
        """What the journals of `placements` take, or those of a model without any."""
        names: list[Placement | None] = [*self.placements(placement)]
        return journal_bytes(self.vllm_config, self._count_journals(names or [placement]))

    def _count_journals(self, placements: Iterable[Placement | None]) -> JournalCounts:
        """What these placements need together; None is the one that is in use."""
        counts = JournalCounts()
        for placement in placements:
            layers = self.layers
            if placement is not None:
                layers = collect_layers(self.vllm_config, *self.models, placement=placement)
            counts |= count_journals(self.vllm_config, layers)
        return counts

    def place(self, placement: Placement, config: KVCacheConfig) -> dict[int, str]:
        """Use other mixers of a supernet, with their weights and memory for them, which is all that
        is kept; no request is left. Returns them by layer.

        If that fails, the worker has no state memory until another placement, such as the old one,
        is placed."""
        model, live = self.supernet(), self.live_placements(placement)
        self.drop_graphs()
        self.release_kv_cache()
        self.journals = None
        self.journal_pool.release()
        # The new parts have other sizes: no hole of the old ones' may remain.
        gc.collect()
        current_platform.empty_cache()
        self.mixers.fetch(live)
        placed = model.set_layer_placements(placement)
        self._collect_layers()
        self.mixers.send(live)
        current_platform.empty_cache()
        self.initialize_kv_cache(config)
        return placed

    def supernet(self) -> HasPlacements:
        """The model; `VLLMValidationError` if its layers have one mixer each."""
        if not isinstance(self.model, HasPlacements) or not self.model.get_mixer_names():
            raise placement_error(NO_SUPERNET)
        return self.model

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the arena, bind each layer's view of it and make the metadata builders; then the
        same for the other placements that requests choose from, in the same memory."""
        chosen = config.placements or [PlacementGroups("", 0, len(config.kv_cache_groups))]
        self.journal_pool.reserve(self._count_journals(one.placement or None for one in chosen))
        self.placed, self.own_placement = {}, 0
        for index, one in enumerate(chosen):
            self._add_placement(index, one.placement, config.of_placement(index), one.first)
        if len(chosen) > 1:
            self.use_placement(0)
        if self.drafter is not None:
            self.drafter.bind(DrafterMemory(config, self.block_tables, self.metadata, self.inputs))

    def _add_placement(
        self, index: int, placement: str, config: KVCacheConfig, first_group: int
    ) -> None:
        """Make what steps of a placement need, in the arena if there is one, and use it."""
        layers = self.layers
        if placement:
            layers = collect_layers(self.vllm_config, *self.models, placement=placement)
        buffer = next((placed.arena.buffer for placed in self.placed.values()), None)
        arena = Arena(config, self.device, buffer)
        for name, view in arena.layers.items():
            layers[name].kv_cache = view
        block_tables = BlockTables(
            config,
            self.max_rows,
            self.model_config.max_model_len,
            self.inputs.max_tokens,
            self.device,
            self.depth,
            self.uploads,
            self.width,
        )
        journals = StateJournals.create(
            self.vllm_config, layers, config, self.inputs.progress, self.depth, self.journal_pool
        )
        if journals is not None:
            journals.bind(block_tables, reset=not self.placed)
        groups = []
        for group in config.kv_cache_groups:
            if not group.layer_names:
                groups.append(StateGroup([], group.kv_cache_spec, None))
                continue
            backend = group_backend(group.layer_names, layers)
            builder = backend.get_builder_cls()(
                group.kv_cache_spec, group.layer_names, self.vllm_config, self.device
            )
            if self.uploads is not None:
                builder.share_uploads(self.uploads)
            groups.append(StateGroup(group.layer_names, group.kv_cache_spec, builder))
        metadata = StepMetadata(groups, block_tables, layers, self.model_config.max_model_len)
        sanitizer = None
        if self.vllm_config.cache_config.sanitize:
            others = (placed.sanitizer for placed in self.placed.values())
            sanitizer = Sanitizer(
                config, arena, block_tables, self.batch, first_group, next(others, None)
            )
        self.placed[index] = PlacedState(
            placement, config, layers, arena, block_tables, journals, groups, metadata, sanitizer
        )
        self.placed[index].attach_journals()
        self._take_up(index)

    def set_placement(
        self,
        index: int,
        config: KVCacheConfig,
        block_log: Sequence[BlockOperation] | None,
    ) -> bool:
        """Requests may choose a further placement, the `index`-th of `config`, or one in the place
        of another that no request has any more: `block_log` has what became of its blocks if the
        engine sanitizes. Its steps run eagerly. Returns whether its journals, if it has any, find
        room; else its steps write every state."""
        if self.sanitizer is not None:
            self.sanitizer.memory.replay(block_log or ())
        placed = config.placements[index]
        placement = placed.placement
        self._add_placement(index, placement, config.of_placement(index), placed.first)
        counts = self._count_journals([placement])
        return self.journal_pool.size is None or self.journal_pool.has_room_for(counts)

    def use_placement(self, index: int) -> None:
        """From here on steps run this placement, one of `placed`."""
        if index != self.placement:
            self.placed[index].bind()
            self._take_up(index)

    def _take_up(self, index: int) -> None:
        placed, self.placement = self.placed[index], index
        if placed.placement:
            self.supernet().set_layer_placements(placed.placement)
        self.kv_cache_config, self.layers, self.arena = placed.config, placed.layers, placed.arena
        self.block_tables, self.journals = placed.block_tables, placed.journals
        self.groups, self.metadata, self.graphs = placed.groups, placed.metadata, placed.graphs
        self.sanitizer = placed.sanitizer

    def state_memory(self) -> StateMemory:
        """The arena and what a connector may see of it."""
        # A recurrent layer has a tuple of tensors, as connectors expect.
        layers = cast(dict[str, Tensor], self.arena.layers)
        group = self.kv_cache_config.kv_cache_groups[0]
        both = None
        if group.layer_names and (cross := self.arena.cross_layers(group)) is not None:
            both = cross, self.layers[group.layer_names[0]].get_attn_backend()
        return StateMemory(self.arena.buffer, self.arena.plan, layers, both)

    def drop_graphs(self) -> bool:
        """Free the graphs, of which something is about to change; whether any were planned."""
        graphs = [placed.graphs for placed in self.placed.values()]
        had_any = any(one.num_captured or one.num_pending for one in graphs)
        for placed in self.placed.values():
            placed.graphs = StepGraphs()
        self.graphs = StepGraphs()
        return had_any

    def release_kv_cache(self) -> None:
        """Drop the arena (after a profiling run)."""
        for placed in self.placed.values():
            for layer in placed.layers.values():
                layer.kv_cache = torch.empty(0)
            if placed.journals is not None:
                placed.journals.unbind()
        self.placed = {}
        for name in ("arena", "block_tables", "metadata"):
            self.__dict__.pop(name, None)
        self.sanitizer = None
        self.groups = []

    def close(self) -> None:
        """Drop the model, its state and every request."""
        for placed in self.placed.values():
            for layer in placed.layers.values():
                layer.kv_cache = torch.empty(0)
        self.placed, self.layers = {}, {}
        self.journal_pool.release()
        self.drop_graphs()
        self.sanitizer = self.journals = None
        state = ("arena", "block_tables", "metadata")
        for name in ("model", "models", "mixers", "capture", "drafter", "tap", *state):
            self.__dict__.pop(name, None)
