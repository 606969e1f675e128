# SPDX-License-Identifier: Apache-2.0
"""Blocks of one request, per group, as the scheduler and connectors see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass
class KVCacheBlocks:
    """Blocks per group, in token order; null blocks (id 0) where nothing is kept.

    `sources`: of a cached prefix, per group the block whose content ends it and has to be copied
    (see `GroupHit`); empty for anything else.
    """

    blocks: tuple[Sequence[KVCacheBlock], ...]
    sources: tuple[KVCacheBlock | None, ...] = ()

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        return KVCacheBlocks(
            tuple([*a, *b] for a, b in zip(self.blocks, other.blocks, strict=True))
        )

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: Literal[True]) -> tuple[list[int], ...] | None: ...
    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Ids per group; None, if allowed, when there is no block at all."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of a single group's blocks the prefix cache cannot find."""
        if len(self.blocks) != 1:
            raise ValueError(f"{len(self.blocks)} groups: use get_unhashed_block_ids_all_groups()")
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Per group, ids of blocks the prefix cache cannot find; null blocks left out."""
        return [
            [b.block_id for b in group if b.block_hash is None and not b.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, for as many groups."""
        return KVCacheBlocks(tuple([] for _ in self.blocks))
