# SPDX-License-Identifier: Apache-2.0
"""The rounds of speculation over a text that is already known: what was drafted, what accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class RoundCounts:
    """As the server's metrics count: `drafts` are rounds that verified at least one token, and
    `per_position[i]` those in which the first i + 1 were accepted."""

    depth: int
    drafts: int = 0
    draft_tokens: int = 0
    per_position: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.per_position = [0] * self.depth

    def add(self, num_drafts: int, accepted: int) -> None:
        """One round."""
        self.drafts += 1
        self.draft_tokens += num_drafts
        for position in range(accepted):
            self.per_position[position] += 1

    @property
    def rates(self) -> list[float]:
        """Share of the rounds in which the draft at each position was accepted."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.per_position]

    @property
    def length(self) -> float:
        """Mean acceptance length: tokens per round, with the one after the accepted ones."""
        return 1 + sum(self.rates)


def replies(loss_mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and past-the-last index of each run of ones; what has no token before it begins one
    later, as a reply follows a prompt."""
    start: int | None = None
    for index, mask in enumerate([*loss_mask, 0]):
        if mask and start is None:
            start = max(index, 1)
        if not mask and start is not None:
            if index > start:
                yield start, index
            start = None


def count_rounds(
    counts: RoundCounts, token_ids: Sequence[int], drafts: Sequence[Sequence[int]], reply: range
) -> None:
    """Add the rounds that make the tokens `reply`, of which the first comes from the prompt.

    `drafts[t]` follow the token at t + 1. Nothing is drafted past the reply's last token but one:
    the one after it is what the last round adds.
    """
    newest = reply.start
    while (room := reply.stop - 1 - newest) > 0:
        offered = drafts[newest - 1][: min(counts.depth, room)]
        accepted = 0
        for draft, token in zip(offered, token_ids[newest + 1 :], strict=False):
            if draft != token:
                break
            accepted += 1
        counts.add(len(offered), accepted)
        newest += accepted + 1
