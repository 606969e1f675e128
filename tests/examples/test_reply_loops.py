# SPDX-License-Identifier: Apache-2.0
"""Loops at the end of a reply."""

from __future__ import annotations

import pytest
from reply_loops import loop_start


@pytest.mark.parametrize(
    "reply, start",
    [
        ([], 0),
        ([1, 2, 3, 4, 5, 6], 6),
        ([5, 5, 5, 5, 5, 5], 0),
        ([1, 2, 7, 7, 7], 2),
        # Two periods are a repeated line, not a loop.
        ([1, 2, 8, 9, 8, 9], 6),
        ([1, 2, 8, 9, 8, 9, 8, 9], 2),
        # The last period need not be whole.
        ([1, 2, 3, 8, 9, 8, 9, 8, 9, 8], 3),
        # What was repeated before the end is over.
        ([7, 7, 7, 7, 1, 2], 6),
        # Of two loops the longer one counts.
        ([1, 4, 4, 4, 2, 4, 4, 4, 2, 4, 4, 4, 2, 4, 4, 4], 1),
    ],
)
def test_where_it_begins(reply: list[int], start: int) -> None:
    assert loop_start(reply) == start
