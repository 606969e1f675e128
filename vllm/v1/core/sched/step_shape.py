# SPDX-License-Identifier: Apache-2.0
"""The sizes of a step that decide how it is launched: as which graph, or as how many rows.

Replicas that share experts launch their steps alike, so they agree on the sizes before each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepShape:
    """`num_tokens` that `num_reqs` requests run, of which some are prefills; `decode_only`: each
    runs `width` tokens and samples after each."""

    num_tokens: int
    num_reqs: int
    num_prefills: int
    decode_only: bool
    width: int = 1

    @staticmethod
    def covering(shapes: Iterable[StepShape]) -> StepShape:
        """The least shape as which all of these can be launched."""
        found = list(shapes)
        width = max(one.width for one in found)
        found = [one.widened(width) for one in found]
        return StepShape(
            max(one.num_tokens for one in found),
            max(one.num_reqs for one in found),
            max(one.num_prefills for one in found),
            all(one.decode_only for one in found),
            width,
        )

    def widened(self, width: int) -> StepShape:
        """With decodes padded to `width` tokens."""
        more = (self.num_reqs - self.num_prefills) * (width - self.width)
        return replace(self, num_tokens=self.num_tokens + more, width=width)

    def covers(self, other: StepShape) -> bool:
        return StepShape.covering((self, other)) == self


def padded_width(widths: Sequence[int], num_tokens: int) -> int:
    """The least of the `widths` (ascending) of steps that holds decodes of up to so many tokens."""
    return widths[bisect_left(widths, num_tokens)]
