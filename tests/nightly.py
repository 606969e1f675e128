# SPDX-License-Identifier: Apache-2.0
"""Cases that run every night only: more of what the cases beside them test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Parameter sets of these values; one that is a tuple gives several parameters."""
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.nightly)
        for v in values
    ]


def covering(*choices: Sequence[Any]) -> list[Any]:
    """Parameter sets of the product of `choices`. Every two values of different parameters meet in
    one that is not nightly; the others are further cases."""
    rows = list(product(*(range(len(values)) for values in choices)))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    kept = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        kept.add(best)
        missing -= pairs[best]
    return [
        pytest.param(
            *(values[index] for values, index in zip(choices, row, strict=True)),
            marks=() if row in kept else pytest.mark.nightly,
        )
        for row in rows
    ]
