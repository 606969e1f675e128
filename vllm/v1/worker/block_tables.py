# SPDX-License-Identifier: Apache-2.0
"""Which blocks each request owns, per state group, on the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.step import PagedGroups, PagedSlots
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.staging import StagedArray, Uploads


class GroupBlockTable:
    """Block ids of one group, `[rows, width]`, wide enough for requests of `max_length` tokens; row
    = the request's row in the input batch."""

    def __init__(
        self,
        spec: KVCacheSpec,
        max_length: int,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        depth: int,
        uploads: Uploads | None = None,
    ) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        shape = (max_rows, spec.blocks_for(max_length))
        self.table = np.zeros(shape, dtype=np.int32)
        self.num_blocks = np.zeros(max_rows, dtype=np.int32)
        self.staged = StagedArray(shape, torch.int32, device, depth, uploads)
        self.prefills = StagedArray(shape, torch.int32, device, depth, uploads)
        self.slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.decodes = StagedArray((max_rows,), torch.int32, device, depth, uploads)

    def set_row(self, row: int, block_ids: list[int]) -> None:
        # What pads a decode reads past the request's blocks: it finds the null block.
        self.table[row] = 0
        self.num_blocks[row] = 0
        self.append_row(row, block_ids)

    def append_row(self, row: int, block_ids: list[int]) -> None:
        start = int(self.num_blocks[row])
        self.table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def gather(
        self, rows: np.ndarray, padded_rows: int, num_decodes: int, longest: int = 0
    ) -> tuple[Tensor, np.ndarray, Tensor]:
        """Device and host `[padded_rows, width]` tables of the step's requests, the longest of
        which has `longest` tokens; padding is -1. Then the device table of those after the decodes,
        by itself."""
        n = len(rows)
        width = max(int(self.num_blocks[rows].max(initial=1)), 1)
        width = min(max(width, self.spec.blocks_for(longest)), self.table.shape[1])
        host = self.staged.next()
        host[:n, :width] = self.table[rows, :width]
        host[n:padded_rows, :width] = -1
        prefills = n - num_decodes
        self.prefills.next()[:prefills, :width] = host[num_decodes:n, :width]
        return (
            self.staged.upload(padded_rows, width),
            host[:n, :width],
            self.prefills.upload(prefills, width),
        )

    def padding(self, size: int) -> tuple[Tensor, np.ndarray, Tensor]:
        """`gather` of `size` padded decodes at full width, for graph capture."""
        host = self.staged.next()
        host[:size] = -1
        return self.staged.upload(size), host[:size], self.prefills.upload(0)

    def decode_blocks(self, rows: np.ndarray, padded_rows: int) -> Tensor:
        """The only blocks of these rows, decodes of a recurrent group: device `[padded_rows]`,
        padding -1. A group of another kind has none."""
        if not self.spec.is_recurrent:
            return self.decodes.upload(0)
        host = self.decodes.next()
        host[: len(rows)] = self.table[rows, 0]
        host[len(rows) : padded_rows] = -1
        return self.decodes.upload(padded_rows)

    @property
    def paged(self) -> PagedSlots:
        """Where a step's block table and slots lie, for `prepare`."""
        return PagedSlots(self.staged.device, self.block_size, self.slots)


class BlockTables:
    """One table per group, in group order."""

    def __init__(
        self,
        config: KVCacheConfig,
        max_rows: int,
        max_model_len: int,
        max_tokens: int,
        device: torch.device,
        depth: int,
        uploads: Uploads | None = None,
        width: int = 1,
    ) -> None:
        self._uploads = uploads
        # A step in flight may run up to `width` tokens past the limit.
        longest = max_model_len + width
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self.groups = [
            GroupBlockTable(spec, longest, max_rows, max_tokens, device, depth, uploads)
            for spec in specs
        ]
        paged = [group.paged for group in self.groups if not group.spec.is_recurrent]
        states = [group.decodes.device for group in self.groups if group.spec.is_recurrent]
        self.paged = PagedGroups.of(paged, device, states)

    def flush(self) -> None:
        """Queue the copies of what was gathered and mapped, and what else shares the uploads."""
        if self._uploads is not None:
            self._uploads.flush()

    def set_row(self, row: int, block_ids: tuple[list[int], ...]) -> None:
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.set_row(row, ids)

    def append_row(self, row: int, block_ids: tuple[list[int], ...]) -> None:
        for group, ids in zip(self.groups, block_ids, strict=True):
            if ids:
                group.append_row(row, ids)
