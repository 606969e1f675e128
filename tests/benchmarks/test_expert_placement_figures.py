# SPDX-License-Identifier: Apache-2.0
"""Figures of placements: the order in which they get better."""

from benchmarks.expert_placement import measure


def test_copies_make_ranks_even() -> None:
    runs, placed, changed, rearranged, moved, _ = measure(32, 8, 0, 1.0, 0.3, 5)
    assert runs < changed < rearranged < placed <= 1 and 0 < moved <= 32
    assert measure(32, 8, 16, 1.0, 0.3, 5)[1] > placed
