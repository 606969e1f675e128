# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is: a step runs the requests of one placement of a supernet."""

from __future__ import annotations

from collections.abc import Sequence


class PlacementTurns:
    """Placements take turns: who ran longest ago is asked first, and one that has nothing to run
    loses nothing but the question. So none waits for more than a step of every other one."""

    def __init__(self, placements: Sequence[int] = (0,)) -> None:
        self._order = list(placements)

    @property
    def alone(self) -> bool:
        """Whether there is one placement only."""
        return len(self._order) == 1

    def join(self, placement: int) -> None:
        """A further placement, or one in another's place."""
        if placement not in self._order:
            self._order.append(placement)

    def order(self) -> list[int]:
        """Who is asked for a step, in this order."""
        return list(self._order)

    def ran(self, placement: int) -> None:
        """A step of this placement was scheduled."""
        if len(self._order) > 1:
            self._order.remove(placement)
            self._order.append(placement)
