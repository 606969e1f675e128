# SPDX-License-Identifier: Apache-2.0
"""Filling blocks with NaN and searching them for it: device side of the sanitizer.

Bytes 0xFF are a NaN in every float dtype, and one that no arithmetic on numbers produces.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.v1.kv_cache_interface import GroupPlan, KVCacheGroupSpec
from vllm.v1.worker.arena import Arena

#: bytes of a gathered copy that is searched at once
_CHUNK_BYTES = 64 * 2**20
_FILL = -1


class GroupProbe:
    """One group's blocks: as raw words, and as what its layers keep.

    `parts`: `[num_blocks, rows, layers, ...]`, or for recurrent layers one
    `[num_blocks, layers, ...]` per state tensor.
    """

    def __init__(self, arena: Arena, group: KVCacheGroupSpec, plan: GroupPlan) -> None:
        self.layer_names = group.layer_names
        self.recurrent = group.kv_cache_spec.is_recurrent
        self._tokens_per_row = group.kv_cache_spec.tokens_per_row
        stride = arena.plan.page_bytes // plan.blocks_per_page
        num_blocks = arena.plan.num_pages * plan.blocks_per_page
        self._words = arena.buffer.view(torch.int64).view(num_blocks, stride // 8)
        self.parts: list[Tensor] = []
        if not group.layer_names:  # they are on other pipeline stages
            return
        offsets = [plan.layer_offsets[name] for name in group.layer_names]
        pitch = offsets[1] - offsets[0] if len(offsets) > 1 else 0
        first = arena.layers[group.layer_names[0]]
        tensors = first if isinstance(first, tuple) else (first,)
        parts = [_all_layers(tensor, len(offsets), pitch) for tensor in tensors]
        self.parts = [
            part if view.token_dim is None else part.movedim(2 + view.token_dim, 1)
            for part, view in zip(parts, group.kv_cache_spec.views, strict=True)
        ]

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._words.device)

    # ---- filling -------------------------------------------------------------------------------

    def fill(self, block_ids: np.ndarray) -> None:
        """Make every bit of these blocks 1, padding included."""
        self._words.index_fill_(0, self._index(block_ids), _FILL)

    def touched(self, block_ids: np.ndarray) -> int | None:
        """The first of these blocks that is not as `fill` left it."""
        same = (self._words.index_select(0, self._index(block_ids)) == _FILL).all(1)
        if bool(same.all()):
            return None
        return int(block_ids[int((~same).to(torch.int8).argmax())])

    # ---- searching -----------------------------------------------------------------------------

    def nan_tokens(self, block_ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Which of these tokens (`block_ids, offsets [n]`) complete a row that holds NaN in any
        layer, `[n]` bool."""
        result = np.zeros(len(block_ids), dtype=bool)
        if not self.parts:
            return result
        (part,) = self.parts
        width = part[0, 0].numel() * part.element_size()
        size = max(1, _CHUNK_BYTES // width)
        complete = np.flatnonzero((offsets + 1) % self._tokens_per_row == 0)
        for start in range(0, len(complete), size):
            tokens = complete[start : start + size]
            rows = offsets[tokens] // self._tokens_per_row
            found = _has_nan(part[self._index(block_ids[tokens]), self._index(rows)])
            result[tokens] = found.cpu().numpy()
        return result

    def nan_states(self, block_ids: np.ndarray) -> np.ndarray:
        """Which of these recurrent states hold NaN, `[n]` bool."""
        index = self._index(block_ids)
        found = torch.zeros(len(block_ids), dtype=torch.bool, device=index.device)
        for part in self.parts:
            found |= _has_nan(part.index_select(0, index))
        return found.cpu().numpy()

    def first_nan(self, block_id: int, offset: int) -> tuple[str, bool]:
        """`(layer, whether it was never written)` of the first NaN in a token's row or a state."""
        row = offset // self._tokens_per_row
        kept = [p[block_id] if self.recurrent else p[block_id, row] for p in self.parts]
        layers = torch.stack([_has_nan(values) for values in kept]).any(0)
        layer = int(layers.to(torch.int8).argmax())
        unwritten = False
        for values in (values[layer].contiguous() for values in kept):
            nan = values[values.isnan()]
            raw = nan.view(torch.uint8) == 0xFF
            unwritten |= len(nan) > 0 and bool(raw.view(len(nan), -1).all(1).any())
        return self.layer_names[layer], unwritten


def _all_layers(view: Tensor, num_layers: int, pitch_bytes: int) -> Tensor:
    """The first layer's `[num_blocks, ...]` -> `[num_blocks, layers, ...]`."""
    pitch = pitch_bytes // view.element_size()
    return view.as_strided(
        (view.shape[0], num_layers, *view.shape[1:]),
        (view.stride(0), pitch, *view.stride()[1:]),
        view.storage_offset(),
    )


def _has_nan(values: Tensor) -> Tensor:
    """`[n, ...]` -> `[n]` bool."""
    # A sum is NaN if any addend is, and costs far less; infinities cancel to NaN as well.
    suspect = values.flatten(1).sum(1, dtype=torch.float32).isnan()
    return values.isnan().flatten(1).any(1) if bool(suspect.any()) else suspect
