# SPDX-License-Identifier: Apache-2.0
"""One rank's host tier: memory laid out like the arena, so that runs of blocks are one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from vllm.v1.kv_cache_interface import ArenaPlan

#: group, device block, host block
Place = tuple[int, int, int]


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

    def block(self, group: int, block: int) -> np.ndarray:
        """`uint8 [block_bytes]`: a block's data, without padding."""
        start = block * self._plan.block_stride(group) - self._plan.page_bytes
        return self._bytes[start : start + self._plan.groups[group].block_bytes]


def runs(places: Iterable[Place]) -> Iterator[tuple[int, int, int, int]]:
    """Group, first device block, first host block and count of blocks that follow one another in
    both memories."""
    first: Place | None = None
    count = 0
    for group, device, host in sorted(places):
        if first is not None and (group, device, host) == (
            first[0],
            first[1] + count,
            first[2] + count,
        ):
            count += 1
            continue
        if first is not None:
            yield (*first, count)
        first, count = (group, device, host), 1
    if first is not None:
        yield (*first, count)
