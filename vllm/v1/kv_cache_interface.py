# SPDX-License-Identifier: Apache-2.0
"""What layers keep between steps (specs) and where it lies in the page arena (plans): all the names
that connectors, backends and layers from elsewhere import.

Vocabulary and byte layout: docs/state_memory.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from vllm.v1.kv_cache_specs.attention import AttentionSpec as AttentionSpec
from vllm.v1.kv_cache_specs.attention import ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec
from vllm.v1.kv_cache_specs.attention import FullAttentionSpec as FullAttentionSpec
from vllm.v1.kv_cache_specs.attention import HiddenStateCacheSpec as HiddenStateCacheSpec
from vllm.v1.kv_cache_specs.attention import KeysAndValuesSpec as KeysAndValuesSpec
from vllm.v1.kv_cache_specs.attention import KVQuantMode as KVQuantMode
from vllm.v1.kv_cache_specs.attention import MLAAttentionSpec as MLAAttentionSpec
from vllm.v1.kv_cache_specs.attention import SlidingWindowMLASpec as SlidingWindowMLASpec
from vllm.v1.kv_cache_specs.attention import SlidingWindowSpec as SlidingWindowSpec
from vllm.v1.kv_cache_specs.base import KVCacheSpec as KVCacheSpec
from vllm.v1.kv_cache_specs.base import StateView as StateView
from vllm.v1.kv_cache_specs.recurrent import STATE_ALIGNMENT as STATE_ALIGNMENT
from vllm.v1.kv_cache_specs.recurrent import MambaAttentionBackendEnum as MambaAttentionBackendEnum
from vllm.v1.kv_cache_specs.recurrent import MambaSpec as MambaSpec


@dataclass(frozen=True)
class GroupPlan:
    """How a group's blocks lie in a page.

    `blocks_per_page` blocks side by side; each holds `block_bytes` bytes of data, its layers at
    `layer_offsets` (bytes from the start of the block).
    """

    blocks_per_page: int
    block_bytes: int
    layer_offsets: dict[str, int] = field(hash=False)


@dataclass(frozen=True)
class ArenaPlan:
    """`num_pages` pages of `page_bytes`; page 0 is the null page.

    Block `b` of group `g` starts at byte `b * page_bytes // groups[g].blocks_per_page` (exact),
    so ids `0 .. blocks_per_page - 1` of every group are null.
    """

    page_bytes: int
    num_pages: int
    groups: tuple[GroupPlan, ...]

    def block_stride(self, group_id: int) -> int:
        """Bytes from one block of the group to the next."""
        return self.page_bytes // self.groups[group_id].blocks_per_page

    def num_blocks(self, group_id: int) -> int:
        """Block ids of the group over the whole arena, null ones included."""
        return self.num_pages * self.groups[group_id].blocks_per_page

    def padding(self, group_id: int) -> float:
        """Part of a page that is no data when it is full of the group's blocks."""
        return 1.0 - self.groups[group_id].block_bytes / self.block_stride(group_id)


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that grow alike but differ in size, by name; read by connectors.

    The arena never needs it: its groups hold layers of one spec.
    """

    kind: ClassVar[str] = "uniform"

    kv_cache_specs: dict[str, KVCacheSpec] = field(hash=False)

    def of_layer(self, name: str) -> KVCacheSpec:
        return self.kv_cache_specs[name]

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_blocks_per_request(self, max_num_batched_tokens: int, max_model_len: int) -> int:
        return max(
            spec.max_blocks_per_request(max_num_batched_tokens, max_model_len)
            for spec in self.kv_cache_specs.values()
        )


@dataclass
class KVCacheTensor:
    """Where the layers in `shared_by` lie in the arena.

    Their block `b` starts at byte `offset + b * block_stride`; `size` counts the bytes of all
    their blocks, without what lies between. Entries of different groups overlap: a page belongs
    to one group at a time.
    """

    size: int
    shared_by: list[str]
    offset: int = 0
    block_stride: int = 0


@dataclass
class KVCacheGroupSpec:
    """Layers with one spec and one block table, in layer order."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False

    @property
    def layer_specs(self) -> dict[str, KVCacheSpec]:
        """Every layer's own spec."""
        return {name: self.kv_cache_spec.of_layer(name) for name in self.layer_names}


@dataclass(frozen=True)
class PlacementGroups:
    """A placement of a supernet, its mixers joined by commas, and the groups of the layers it uses:
    `count` of the arena's groups from `first` on."""

    placement: str
    first: int
    count: int


@dataclass
class KVCacheConfig:
    """Everything workers and scheduler know about state memory.

    `num_blocks` counts arena pages (with a single group a page is one block). `placements`: where
    requests choose among several placements of a supernet, the groups of each; a layer that two of
    them use is in a group of each. None: all groups are the model's.
    """

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    plan: ArenaPlan
    placements: list[PlacementGroups] = field(default_factory=list)

    def of_placement(self, index: int) -> KVCacheConfig:
        """The memory as one placement sees it: its own groups, numbered from 0, in all pages."""
        if not self.placements:
            return self
        chosen = self.placements[index]
        own = slice(chosen.first, chosen.first + chosen.count)
        groups = self.kv_cache_groups[own]
        num_before = sum(len(group.layer_names) for group in self.kv_cache_groups[: own.start])
        num_own = sum(len(group.layer_names) for group in groups)
        tensors = self.kv_cache_tensors[num_before : num_before + num_own]
        plan = replace(self.plan, groups=self.plan.groups[own])
        return KVCacheConfig(self.num_blocks, tensors, groups, plan)

    @property
    def has_mamba_layers(self) -> bool:
        return any(group.kv_cache_spec.is_recurrent for group in self.kv_cache_groups)
