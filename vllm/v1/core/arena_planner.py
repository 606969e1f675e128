# SPDX-License-Identifier: Apache-2.0
"""Chooses the arena's page size, the blocks per page of every group, and where layers lie.

The guarantee proved in docs/state_memory.md and property-tested: the page is below four times the
largest block, and every group's block stride is below 1.5 times its block (both in units of 256
bytes). Typical padding is far below 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.v1.kv_cache_interface import ArenaPlan, GroupPlan, KVCacheGroupSpec

#: Bytes; every block and every layer in it starts at a multiple of this from the arena's start.
ALIGNMENT = 256
#: A larger page is looked for only while the worst group of the smaller ones wastes more.
GOOD_PADDING = 1 / 64
#: Pages are searched up to this many times the largest block; the proof needs 4.
MAX_PAGE_TO_BLOCK = 4


@dataclass(frozen=True)
class PageChoice:
    """A page size in bytes and the blocks per page of every group."""

    page_bytes: int
    blocks_per_page: tuple[int, ...]


def layer_layout(group: KVCacheGroupSpec) -> tuple[dict[str, int], int]:
    """Byte offset of every layer in the group's block, in layer order, and the block's bytes.

    Every layer starts at a multiple of 256 bytes; the last one is not padded.
    """
    if not group.layer_names:
        return {}, 0
    size = group.kv_cache_spec.page_size_bytes
    pitch = -(-size // ALIGNMENT) * ALIGNMENT
    offsets = {name: i * pitch for i, name in enumerate(group.layer_names)}
    return offsets, (len(group.layer_names) - 1) * pitch + size


def group_plans(
    groups: Sequence[KVCacheGroupSpec], blocks_per_page: Sequence[int]
) -> tuple[GroupPlan, ...]:
    """Of groups with so many blocks in a page."""
    layouts = zip(blocks_per_page, map(layer_layout, groups), strict=True)
    return tuple(GroupPlan(count, size, offsets) for count, (offsets, size) in layouts)


def choose_page(block_bytes: Sequence[int]) -> PageChoice:
    """The page for groups with these block sizes (bytes, each >= 1).

    Searches every page from the largest block to four times it, in thirds: the first third
    (pages of one to two largest blocks) wins if its best page wastes at most 1/64 in every group,
    else the second, and so on; else the best page of all. Best: the smallest worst padding over
    the groups, then the smallest sum, then the smallest page.
    """
    units = [-(-size // ALIGNMENT) for size in block_bytes]
    best: tuple[float, float, int] | None = None
    for multiple in range(1, MAX_PAGE_TO_BLOCK):
        found = _best_in_window(units, multiple * max(units), (multiple + 1) * max(units) - 1)
        if found is not None and (best is None or found < best):
            best = found
        if best is not None and best[0] <= GOOD_PADDING:
            break
    assert best is not None, "the third window always holds a page 3 * 2**e (docs/state_memory.md)"
    page = best[2]
    return PageChoice(page * ALIGNMENT, tuple(_blocks_in_page(page, unit) for unit in units))


def fit_in_page(groups: Sequence[KVCacheGroupSpec], page_bytes: int) -> tuple[GroupPlan, ...]:
    """Where further groups lie in pages that were chosen for others. ValueError if a block is
    larger than a page; padding has no bound."""
    counts = []
    for group in groups:
        _, size = layer_layout(group)
        if size > page_bytes:
            raise ValueError(
                f"{len(group.layer_names)} layers of {type(group.kv_cache_spec).__name__} keep "
                f"{size} bytes in a block, more than a page of the arena ({page_bytes} bytes)"
            )
        counts.append(_blocks_in_page(page_bytes // ALIGNMENT, -(-size // ALIGNMENT)))
    return group_plans(groups, counts)


def _blocks_in_page(page: int, block: int) -> int:
    """The largest divisor `r` of `page` with `page / r >= block` (all in units of 256 bytes)."""
    return next(r for r in range(page // block, 0, -1) if page % r == 0)


def _best_in_window(units: Sequence[int], first: int, last: int) -> tuple[float, float, int] | None:
    """`(worst padding, sum of paddings, page)` of the best page in `[first, last]` units.

    None when some group's stride would reach 1.5 times its block on every page.
    """
    pages = np.arange(first, last + 1)
    worst = np.zeros(len(pages))
    total = np.zeros(len(pages))
    for unit in set(units):
        padding = 1.0 - unit * _max_blocks(first, last, unit) / pages
        np.maximum(worst, padding, out=worst)
        total += units.count(unit) * padding
    index = int(np.lexsort((total, worst))[0])
    if worst[index] >= 1.0:
        return None
    return float(worst[index]), float(total[index]), first + index


def _max_blocks(first: int, last: int, block: int) -> np.ndarray:
    """For every page in `[first, last]`, the most blocks it can hold at an equal stride.

    `[last - first + 1]` int64; 0 where the stride would reach `1.5 * block`. A page is
    `count * stride`: enumerating whichever of the two has the shorter range keeps the work at
    about `sqrt(last)` strided assignments.
    """
    counts = np.zeros(last - first + 1, dtype=np.int64)
    max_stride = (3 * block - 1) // 2
    low, high = first // max_stride, last // block
    if high - low < max_stride - block:
        for count in range(max(low, 1), high + 1):
            start = max(first, count * block)
            start += -start % count
            stop = min(last, count * max_stride)
            counts[start - first : max(stop - first + 1, 0) : count] = count
        return counts
    for stride in range(max_stride, block - 1, -1):
        start = first + -first % stride
        held = np.arange(start // stride, last // stride + 1)
        counts[start - first :: stride] = held
    return counts


def plan_arena(groups: Sequence[KVCacheGroupSpec], num_pages: int) -> ArenaPlan:
    """The plan of an arena of `num_pages` pages for `groups` (at least one, none empty)."""
    choice = choose_page([layer_layout(group)[1] for group in groups])
    plans = group_plans(groups, choice.blocks_per_page)
    return ArenaPlan(choice.page_bytes, num_pages, plans)
