# SPDX-License-Identifier: Apache-2.0
"""Placements of experts: what holds of all of them, and how few experts move."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.model_executor.layers.expert_placement import (
    COLUMNS,
    Placement,
    improved,
    moves,
    place,
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Counts, ranks and slots per rank; many counts are equal, and some large."""
    num_ranks, num_experts = draw(st.integers(2, 6)), draw(st.integers(1, 24))
    count = st.sampled_from([0, 0, 1, 2, 3, 7, 100, 10**9]) | st.integers(0, 1000)
    counts = draw(st.lists(count, min_size=num_experts, max_size=num_experts))
    slots = draw(st.integers(-(-num_experts // num_ranks), num_experts))
    return counts, num_ranks, slots


def check(placement: Placement, num_experts: int, num_ranks: int, slots: int) -> None:
    assert placement.num_ranks == num_ranks and len(placement.slots) == num_ranks * slots
    assert set(placement.slots) == set(range(num_experts))
    for rank in range(num_ranks):
        assert len(set(placement.experts_of(rank))) == slots
    parts = Counter[int]()
    for expert, columns in zip(placement.slots, placement.columns, strict=True):
        assert columns >= 0
        parts[expert] += columns
    assert set(parts.values()) == {COLUMNS}
    for expert, row in enumerate(placement.table()):
        assert len(row) == COLUMNS and {placement.slots[slot] for slot in row} == {expert}


@settings(deadline=None)
@given(problems())
def test_every_expert_has_a_slot_and_every_rank_equally_many(
    problem: tuple[list[int], int, int],
) -> None:
    counts, num_ranks, slots = problem
    placement = place(counts, num_ranks, slots)
    check(placement, len(counts), num_ranks, slots)
    assert sum(placement.loads(counts)) == COLUMNS * sum(counts)
    assert 1 / num_ranks <= placement.balancedness(counts) <= 1


@settings(deadline=None)
@given(problems())
def test_copies_never_make_the_busiest_rank_busier(problem: tuple[list[int], int, int]) -> None:
    counts, num_ranks, slots = problem
    counts += [0] * (-len(counts) % num_ranks)
    alone = place(counts, num_ranks, len(counts) // num_ranks)
    assert set(Counter(alone.slots).values()) == {1}
    assert place(counts, num_ranks, slots).balancedness(counts) >= alone.balancedness(counts)


@settings(deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_a_new_placement_is_better_or_none(
    problem: tuple[list[int], int, int], random: object
) -> None:
    """The same experts stay where they are, and moves fill exactly the slots that change."""
    counts, num_ranks, slots = problem
    before = place(counts[::-1], num_ranks, slots)
    after = improved(before, counts)
    check(after, len(counts), num_ranks, slots)
    assert after == before or after.balancedness(counts) > before.balancedness(counts)
    assert improved(after, counts).slots == after.slots
    made = moves(before, after)
    assert [one.target for one in made] == [
        slot for slot, pair in enumerate(zip(before.slots, after.slots, strict=True))
        if pair[0] != pair[1]
    ]  # fmt: skip
    for one in made:
        rank = one.target // slots
        assert before.slots[one.source] == after.slots[one.target]
        assert after.slots[one.target] not in before.experts_of(rank)


def test_copies_that_need_not_differ_are_equal() -> None:
    """So that a change of one expert's tokens reaches its ranks alike."""
    placement = place([100, 100, 100, 100, 10, 10, 10, 10], 2, 6)
    assert placement.columns == (*[32] * 4, 64, 64) * 2
    assert placement.balancedness([900, 3, 70, 1, 10, 10, 10, 10]) == 1.0


def test_a_hot_expert_is_spread_over_all_ranks() -> None:
    counts = [700, *[10] * 7]
    assert place(counts, 4, 2).balancedness(counts) == pytest.approx(770 / (4 * 710))
    spread = place(counts, 4, 3)
    assert Counter(spread.slots)[0] == 4
    assert spread.balancedness(counts) > 0.98


def test_without_tokens_all_ranks_are_alike() -> None:
    placement = place([0] * 8, 4, 3)
    assert placement.loads([1] * 8) == [2 * COLUMNS] * 4
    assert placement.balancedness([0] * 8) == 1.0
    assert improved(placement, [0] * 8) == placement


def test_tokens_go_to_other_copies_before_experts_move() -> None:
    before = place([100, 100, 100, 100, 10, 10, 10, 10], 2, 6)
    assert set(before.experts_of(0)) & {4, 5, 6, 7} == {4, 6}
    counts = [100, 100, 100, 100, 80, 10, 80, 10]
    after = improved(before, counts)
    assert after.slots == before.slots and after.columns != before.columns
    assert before.balancedness(counts) < 0.95 < 0.99 < after.balancedness(counts)
    check(after, 8, 2, 6)


def test_a_small_gain_moves_nothing() -> None:
    before = place([100, 100, 100, 100], 2, 2)
    counts = [100, 100, 100, 100]
    counts[before.slots[0]] = counts[before.slots[1]] = 101
    counts[before.slots[2]] = 99
    assert place(counts, 2, 2).balancedness(counts) > before.balancedness(counts)
    assert improved(before, counts) == before


def test_experts_that_stay_together_do_not_move() -> None:
    """0 and 1 stay on the second rank, though a new placement would begin with them."""
    before = Placement((4, 5, 0, 1, 2, 3), (COLUMNS,) * 6, 3)
    counts = [100, 1, 90, 80, 50, 70]
    assert place(counts, 3, 2).slots == (0, 1, 2, 4, 3, 5)
    after = improved(before, counts)
    assert after.slots == (4, 2, 0, 1, 5, 3)
    assert [(one.source, one.target) for one in moves(before, after)] == [(4, 1), (1, 4)]
