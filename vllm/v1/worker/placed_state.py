# SPDX-License-Identifier: Apache-2.0
"""What a runner has for each placement of a supernet: a step runs one of them.

All placements share the arena's bytes, the batch rows and the device's progress of each row. Layers
that several of them use are the same modules, which look at the memory of the placement that runs:
its blocks have another layout in each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, KeepsJournal
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.sanitizer import Sanitizer
from vllm.v1.worker.state_journals import StateJournals
from vllm.v1.worker.step_graphs import StepGraphs
from vllm.v1.worker.step_metadata import StateGroup, StepMetadata


@dataclass
class PlacedState:
    """`config`: the memory as this placement sees it; `placement`: its mixers joined by commas, ""
    where the model has one placement only."""

    placement: str
    config: KVCacheConfig
    layers: dict[str, AttentionLayerBase]
    arena: Arena
    block_tables: BlockTables
    journals: StateJournals | None
    groups: list[StateGroup]
    metadata: StepMetadata
    sanitizer: Sanitizer | None
    graphs: StepGraphs = field(default_factory=StepGraphs)

    def bind(self) -> None:
        """Let the layers see this placement's memory."""
        for name, view in self.arena.layers.items():
            self.layers[name].kv_cache = view
        self.attach_journals()

    def attach_journals(self) -> None:
        """Let the layers keep this placement's journals; without any they write every state."""
        if self.journals is not None:
            self.journals.attach()
            return
        for layer in self.layers.values():
            if isinstance(layer, KeepsJournal):
                layer.journal = None
