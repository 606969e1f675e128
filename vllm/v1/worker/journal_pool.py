# SPDX-License-Identifier: Apache-2.0
"""The journals' memory of one worker (`vllm.kernels.journal`), which placements share.

A batch row belongs to one request, so to one placement: layers of the same shape of two placements
keep their journals in the same places. It is taken once, before the arena is sized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vllm import decisions
from vllm.config import VllmConfig
from vllm.kernels.journal import JournalMemory, JournalShape, JournalSize
from vllm.model_executor.layer_errors import naming_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, KeepsJournal
from vllm.v1.kv_cache_interface import MambaSpec

#: how many layers of each shape keep a journal; `|` is what two placements need together
JournalCounts = Counter[JournalShape]


def count_journals(
    vllm_config: VllmConfig, layers: Mapping[str, AttentionLayerBase]
) -> JournalCounts:
    """Those of a placement's layers; errors name the layer that they come from."""
    counts = JournalCounts()
    for name, layer in layers.items():
        if isinstance(layer, KeepsJournal):
            with naming_layer(name):
                spec = MambaSpec.expect(layer.get_kv_cache_spec(vllm_config))
                counts[layer.journal_shape(spec)] += 1
    return counts


def journal_bytes(vllm_config: VllmConfig, counts: JournalCounts) -> int:
    """What journals of these layers take on a device, for `--max-num-seqs` rows."""
    size = _size_of(vllm_config)
    if size is None:
        return 0
    per_row = sum(
        count * (shape.token_bytes * size.places + shape.input_bytes * size.inputs)
        for shape, count in counts.items()
    )
    return per_row * vllm_config.scheduler_config.max_num_seqs


def _size_of(vllm_config: VllmConfig) -> JournalSize | None:
    interval = vllm_config.cache_config.commit_interval
    return JournalSize.of(interval, vllm_config.tokens_to_verify)


class JournalPool:
    """`size`: places of a batch row, None where there is nothing to keep (see `JournalSize.of`)."""

    def __init__(self, size: JournalSize | None, rows: int, device: torch.device) -> None:
        self.size = size
        self._rows, self._device = rows, device
        self._memories: dict[JournalShape, JournalMemory] = {}
        self._counts = JournalCounts()

    @classmethod
    def create(cls, vllm_config: VllmConfig, device: torch.device) -> JournalPool:
        """An empty one."""
        rows = vllm_config.scheduler_config.max_num_seqs
        return cls(_size_of(vllm_config), rows, device)

    @property
    def tensors(self) -> list[Tensor]:
        """All of the memory."""
        return [tensor for memory in self._memories.values() for tensor in memory.tensors]

    def has_room_for(self, counts: JournalCounts) -> bool:
        """Whether so many layers find their places."""
        return counts <= self._counts

    def reserve(self, counts: JournalCounts) -> None:
        """Have room for so many layers, of placements that take turns. What is there stays if it is
        enough, else no journal may be in use."""
        size = self.size
        if size is None or self.has_room_for(counts):
            return
        self.release()
        self._counts = counts
        self._memories = {
            shape: JournalMemory.create(shape, count, self._rows, size, self._device)
            for shape, count in counts.items()
        }
        decisions.record(
            "journal memory",
            f"{sum(t.nbytes for t in self.tensors) / 2**30:.2f} GiB",
            f"up to {size.most_pending} tokens and {size.width - 1} drafts of each of "
            f"--max-num-seqs {self._rows} requests wait in every layer",
        )

    def release(self) -> None:
        """Give the memory up; no journal may be in use."""
        self._memories, self._counts = {}, JournalCounts()

    def parts(self, groups: Sequence[tuple[JournalShape, int]]) -> list[JournalMemory]:
        """Of each of a placement's groups: the memory of its layers, by their shape and number."""
        used, parts = JournalCounts(), []
        for shape, count in groups:
            begin = used[shape]
            used[shape] += count
            parts.append(self._memories[shape].part(begin, begin + count))
        return parts
