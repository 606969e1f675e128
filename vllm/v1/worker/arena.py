# SPDX-License-Identifier: Apache-2.0
"""The page arena on one device, and each layer's strided view of it (docs/state_memory.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.output import BlockCopy
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, StateView
from vllm.v1.worker.zeroed_memory import new_zeros

LayerCache = Tensor | tuple[Tensor, ...]


class Arena:
    """One `uint8 [num_pages * page_bytes]` buffer and typed views into it.

    A view's dimension 0 is the group's block id; its stride is the group's block stride, the
    inner dimensions are dense and as the spec's `views` say: one tensor per paged layer, a tuple
    of tensors per recurrent one and where keys and values are of different widths. With `buffer`
    they are further views of another arena's bytes.
    """

    def __init__(
        self, config: KVCacheConfig, device: torch.device, buffer: Tensor | None = None
    ) -> None:
        self.plan = config.plan
        if buffer is None:
            # Zeroed: the null page is read by padded rows and must hold finite numbers.
            size = self.plan.num_pages * self.plan.page_bytes
            try:
                buffer = new_zeros(size, device)
            except MemoryError as error:
                raise VLLMValidationError(
                    f"there is no room for the state memory, {error}; give less of it: "
                    + ("VLLM_CPU_KVCACHE_SPACE or " if device.type == "cpu" else "")
                    + "--kv-cache-memory-bytes, --num-gpu-blocks-override",
                    parameter="kv_cache_memory_bytes",
                    value=size,
                ) from error
        self.buffer = buffer
        #: every group's blocks, `uint8 [num_blocks, block_bytes]`
        self._blocks: list[Tensor] = []
        self.layers: dict[str, LayerCache] = {}
        for group, group_plan in zip(config.kv_cache_groups, self.plan.groups, strict=True):
            stride = self.plan.page_bytes // group_plan.blocks_per_page
            num_blocks = self.plan.num_pages * group_plan.blocks_per_page
            self._blocks.append(
                self.buffer.as_strided((num_blocks, group_plan.block_bytes), (stride, 1))
            )
            spec = group.kv_cache_spec
            for name in group.layer_names:
                offset = group_plan.layer_offsets[name]
                views = tuple(self._view(view, num_blocks, stride, offset) for view in spec.views)
                paged = len(views) == 1 and not spec.is_recurrent
                self.layers[name] = views[0] if paged else views

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, all layers of their group at once, in order."""
        for copy in copies:
            blocks = self._blocks[copy.group_id]
            blocks[copy.target].copy_(blocks[copy.source])

    def cross_layers(self, group: KVCacheGroupSpec) -> Tensor | None:
        """`[num_blocks, layers, *view]` over all layers of the arena's only group; None where a
        layer keeps more than one tensor, or several groups share the arena."""
        [plan, *others] = self.plan.groups
        views = group.kv_cache_spec.views
        offsets = [plan.layer_offsets[name] for name in group.layer_names]
        steps = {b - a for a, b in zip(offsets, offsets[1:], strict=False)}
        if others or len(views) != 1 or len(steps) > 1 or offsets[0]:
            return None
        first = self.layers[group.layer_names[0]]
        assert isinstance(first, Tensor)
        step = steps.pop() // first.element_size() if steps else first[0].numel()
        shape = (first.shape[0], len(offsets), *first.shape[1:])
        return first.as_strided(shape, (first.stride(0), step, *first.stride()[1:]))

    def _view(
        self, view: StateView, num_blocks: int, stride_bytes: int, layer_offset: int
    ) -> Tensor:
        inner = [1]
        for size in reversed(view.shape[1:]):
            inner.insert(0, inner[0] * size)
        item = view.dtype.itemsize
        return self.buffer.view(view.dtype).as_strided(
            (num_blocks, *view.shape),
            (stride_bytes // item, *inner),
            (layer_offset + view.offset) // item,
        )
