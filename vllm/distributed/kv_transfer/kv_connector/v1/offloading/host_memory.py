# SPDX-License-Identifier: Apache-2.0
"""The host tier's memory of one worker."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.v1.kv_cache_interface import ArenaPlan


class HostMemory:
    """`num_pages` pages; the null page of the plan takes no memory. Page-locked with `pinned`, so
    that a device copies at the link's speed."""

    def __init__(self, plan: ArenaPlan, num_pages: int, pinned: bool) -> None:
        self._plan = plan
        self._num_pages = num_pages
        self.buffer = torch.empty(num_pages * plan.page_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._bytes = self.buffer.numpy()

    def num_blocks(self, group: int) -> int:
        """One more than the largest block id of the group."""
        return (self._num_pages + 1) * self._plan.groups[group].blocks_per_page

    def span(self, group: int, block: int, count: int) -> Tensor:
        """`uint8 [count * block_stride]`: `count` blocks from `block` on."""
        stride = self._plan.block_stride(group)
        start = block * stride - self._plan.page_bytes
        return self.buffer[start : start + count * stride]

    def extent(self, group: int, block: int) -> tuple[int, int]:
        """First byte in `buffer` and bytes of a block's data, without padding."""
        start = block * self._plan.block_stride(group) - self._plan.page_bytes
        return start, self._plan.groups[group].block_bytes

    def block(self, group: int, block: int) -> np.ndarray:
        """`uint8 [block_bytes]`: a block's data."""
        start, size = self.extent(group, block)
        return self._bytes[start : start + size]
