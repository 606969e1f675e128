# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of every group lie in the page arena (docs/state_memory.md)."""

from __future__ import annotations

from dataclasses import dataclass, field


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
