# SPDX-License-Identifier: Apache-2.0
"""Where a reply begins to repeat itself for good, which small models do and all drafters guess."""

from __future__ import annotations

from collections.abc import Sequence

#: a period counts as a loop when the reply ends in this many of it
_REPEATS = 3


def loop_start(token_ids: Sequence[int]) -> int:
    """Index of the first token of the loop that the reply ends in; its length if there is none.

    A loop is the longest end of the reply that has a period and at least three of them.
    """
    length = len(token_ids)
    first = length
    for period in range(1, length // _REPEATS + 1):
        start = length - period
        while start and token_ids[start - 1] == token_ids[start - 1 + period]:
            start -= 1
        if length - start >= _REPEATS * period:
            first = min(first, start)
    return first
