# SPDX-License-Identifier: Apache-2.0
"""The page solver and the layout inside a block."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from state_cases import full, hidden, recurrent

from vllm.v1.core.arena_planner import choose_page, layer_layout, plan_arena
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

QWEN = [24 * 2146304, 8 * 65536, 245760]


def units(size: int) -> int:
    return -(-size // 256)


@settings(max_examples=150, deadline=None)
@example([1])
@example([256, 512, 768])
@example([3 * 256, 2 * 256 + 1])
@example(QWEN)
@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=6))
def test_guarantee(sizes):
    choice = choose_page(sizes)
    page = units(choice.page_bytes)
    assert page * 256 == choice.page_bytes
    assert max(map(units, sizes)) <= page < 4 * max(map(units, sizes))
    for size, count in zip(sizes, choice.blocks_per_page, strict=True):
        assert count >= 1
        assert page % count == 0, "every block starts at a multiple of 256 bytes"
        assert units(size) <= page // count < 1.5 * units(size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_optimal_against_exhaustive_search(blocks):
    """In units of 256 bytes, small enough to try every page and divisor."""

    def padding(page):
        best = [max(r for r in range(1, page // b + 1) if page % r == 0) for b in blocks]
        waste = [1 - b * r / page for b, r in zip(blocks, best, strict=True)]
        return max(waste), sum(waste), page

    largest = max(blocks)
    best = None
    for multiple in (1, 2, 3):
        pages = range(multiple * largest, (multiple + 1) * largest)
        found = min(padding(page) for page in pages)
        best = found if best is None else min(best, found)
        if best[0] <= 1 / 64:
            break
    choice = choose_page([b * 256 for b in blocks])
    worst, total, _ = padding(choice.page_bytes // 256)
    assert worst == pytest.approx(best[0], abs=1e-12)
    assert total == pytest.approx(best[1], abs=1e-9)


def test_one_group_is_one_block_per_page():
    for size in (1, 256, 65536, 123457):
        choice = choose_page([size])
        assert choice.blocks_per_page == (1,)
        assert choice.page_bytes == units(size) * 256


def test_equal_groups_share_a_capacity():
    assert choose_page([1024, 1024]).blocks_per_page == (1, 1)


def test_qwen35_4b_wastes_about_one_percent():
    choice = choose_page(QWEN)
    for size, count in zip(QWEN, choice.blocks_per_page, strict=True):
        assert 1 - size * count / choice.page_bytes < 0.011
    assert choose_page(QWEN[:2]).page_bytes < 1.001 * QWEN[0]


def test_larger_page_when_the_first_window_is_bad():
    """Blocks of 2 and 3 units: a page of 3 wastes a third, one of 6 nothing."""
    choice = choose_page([512, 768])
    assert choice.page_bytes == 1536
    assert choice.blocks_per_page == (3, 2)


def test_layers_are_aligned_and_in_order():
    odd = MambaSpec(16, ((100,),), (full().dtype,))  # 200 bytes
    offsets, size = layer_layout(KVCacheGroupSpec(["b", "a", "c"], odd))
    assert list(offsets.items()) == [("b", 0), ("a", 256), ("c", 512)]
    assert size == 712


def test_plan_places_every_byte_once():
    groups = [
        KVCacheGroupSpec([f"gdn.{i}" for i in range(24)], recurrent()),
        KVCacheGroupSpec([f"attn.{i}" for i in range(8)], full()),
        KVCacheGroupSpec(["cache_only"], hidden()),
    ]
    plan = plan_arena(groups, num_pages=5)
    assert plan.num_pages == 5
    assert [len(g.layer_offsets) for g in plan.groups] == [24, 8, 1]
    for g, group in enumerate(groups):
        size = group.kv_cache_spec.page_size_bytes
        ends = [0, *(offset + size for offset in plan.groups[g].layer_offsets.values())]
        starts = [*plan.groups[g].layer_offsets.values(), plan.block_stride(g)]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))
        assert ends[-1] == plan.groups[g].block_bytes
        assert plan.block_stride(g) * plan.num_blocks(g) == plan.page_bytes * plan.num_pages
        assert plan.padding(g) < 0.011
