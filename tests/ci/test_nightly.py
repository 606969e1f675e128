# SPDX-License-Identifier: Apache-2.0
"""What stays of a product when the rest of it runs every night."""

from __future__ import annotations

from itertools import combinations, product

from tests.nightly import covering


def test_every_two_values_meet_in_what_stays() -> None:
    choices = ["abcd", "xyz", "12"]
    sets = covering(*choices)
    assert [one.values for one in sets] == list(product(*choices))
    kept = [one.values for one in sets if not one.marks]
    assert len(kept) == 12, "as many as the two longest have pairs"
    for one, other in combinations(range(3), 2):
        met = {(row[one], row[other]) for row in kept}
        assert met == set(product(choices[one], choices[other]))


def test_two_parameters_stay_whole() -> None:
    assert not any(one.marks for one in covering("ab", "xyz"))
