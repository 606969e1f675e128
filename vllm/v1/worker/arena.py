# SPDX-License-Identifier: Apache-2.0
"""The page arena on one device, and each layer's strided view of it (docs/state_memory.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.v1.core.sched.output import BlockCopy
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)

LayerCache = Tensor | tuple[Tensor, ...]


def block_shape(spec: AttentionSpec) -> tuple[int, ...]:
    """Shape of one layer's part of a block.

    Attention `(2, block_size, kv_heads, head_size)`, keys first; captured hidden states
    `(block_size, columns, hidden)`; MLA latents `(block_size, latent)`.
    """
    if isinstance(spec, HiddenStateCacheSpec):
        return (spec.block_size, spec.num_kv_heads, spec.head_size)
    if isinstance(spec, MLAAttentionSpec):
        return (spec.storage_block_size, spec.head_size)
    return (2, spec.block_size, spec.num_kv_heads, spec.head_size)


class Arena:
    """One `uint8 [num_pages * page_bytes]` buffer and typed views into it.

    A view's dimension 0 is the group's block id; its stride is the group's block stride, the
    inner dimensions are dense.
    """

    def __init__(self, config: KVCacheConfig, device: torch.device) -> None:
        self.plan = config.plan
        # Zeroed: the null page is read by padded rows and must hold finite numbers.
        self.buffer = torch.zeros(
            self.plan.num_pages * self.plan.page_bytes, dtype=torch.uint8, device=device
        )
        #: every group's blocks, `uint8 [num_blocks, block_bytes]`
        self._blocks: list[Tensor] = []
        self.layers: dict[str, LayerCache] = {}
        for group, group_plan in zip(config.kv_cache_groups, self.plan.groups, strict=True):
            stride = self.plan.page_bytes // group_plan.blocks_per_page
            num_blocks = self.plan.num_pages * group_plan.blocks_per_page
            self._blocks.append(
                self.buffer.as_strided((num_blocks, group_plan.block_bytes), (stride, 1))
            )
            for name in group.layer_names:
                offset = group_plan.layer_offsets[name]
                self.layers[name] = self._layer_view(
                    group.kv_cache_spec, num_blocks, stride, offset
                )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, all layers of their group at once, in order."""
        for copy in copies:
            blocks = self._blocks[copy.group_id]
            blocks[copy.target].copy_(blocks[copy.source])

    def _layer_view(
        self, spec: KVCacheSpec, num_blocks: int, stride: int, offset: int
    ) -> LayerCache:
        if isinstance(spec, MambaSpec):
            return tuple(
                self._strided(shape, dtype, num_blocks, stride, offset + inner)
                for shape, dtype, inner in zip(
                    spec.shapes, spec.dtypes, spec.state_offsets, strict=True
                )
            )
        assert isinstance(spec, AttentionSpec)
        return self._strided(block_shape(spec), spec.dtype, num_blocks, stride, offset)

    def _strided(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        num_blocks: int,
        stride_bytes: int,
        offset_bytes: int,
    ) -> Tensor:
        inner = [1]
        for size in reversed(shape[1:]):
            inner.insert(0, inner[0] * size)
        item = dtype.itemsize
        return self.buffer.view(dtype).as_strided(
            (num_blocks, *shape), (stride_bytes // item, *inner), offset_bytes // item
        )
