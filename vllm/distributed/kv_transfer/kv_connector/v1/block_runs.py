# SPDX-License-Identifier: Apache-2.0
"""Blocks that lie side by side in two memories, so that one copy moves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: group, block on the device, block in the host's memory
Place = tuple[int, int, int]


def runs(places: Iterable[Place]) -> Iterator[tuple[int, int, int, int]]:
    """Group, first device block, first host block and count of blocks that follow one another in
    both memories."""
    first: Place | None = None
    count = 0
    for group, device, host in sorted(places):
        if first is not None and (group, device, host) == (
            first[0],
            first[1] + count,
            first[2] + count,
        ):
            count += 1
            continue
        if first is not None:
            yield (*first, count)
        first, count = (group, device, host), 1
    if first is not None:
        yield (*first, count)
