# SPDX-License-Identifier: Apache-2.0
"""Which experts each rank has, and how often: a function of how many tokens each expert gets.

Integers only, so that every rank finds the same placement from the same counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

#: equal parts of an expert's tokens, of which each of its copies gets some
COLUMNS = 64
#: what moves of experts must take from the busiest rank's load, in percent
_LEAST_GAIN = 5


@dataclass(frozen=True)
class Placement:
    """`slots`: the expert in each slot, rank after rank, equally many each and no expert twice on a
    rank. `columns`: how many of the `COLUMNS` parts of its expert's tokens each slot gets."""

    slots: tuple[int, ...]
    columns: tuple[int, ...]
    num_ranks: int

    @property
    def slots_per_rank(self) -> int:
        return len(self.slots) // self.num_ranks

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """In the order of the rank's slots."""
        return self.slots[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def table(self) -> list[list[int]]:
        """`[experts][COLUMNS]`: the slot of each part of an expert's tokens."""
        rows: list[list[int]] = [[] for _ in range(max(self.slots) + 1)]
        for slot, (expert, columns) in enumerate(zip(self.slots, self.columns, strict=True)):
            rows[expert] += [slot] * columns
        return rows

    def loads(self, counts: Sequence[int]) -> list[int]:
        """Of each rank, `COLUMNS` for a token; `counts [experts]`: tokens of each expert."""
        found = [0] * self.num_ranks
        for slot, (expert, columns) in enumerate(zip(self.slots, self.columns, strict=True)):
            found[slot // self.slots_per_rank] += columns * counts[expert]
        return found

    def balancedness(self, counts: Sequence[int]) -> float:
        """The mean load of a rank over the largest: 1 if all have as much, and without tokens."""
        loads = self.loads(counts)
        return sum(loads) / (len(loads) * max(loads)) if max(loads) else 1.0


@dataclass(frozen=True)
class Move:
    """The expert in the slot `source` is to be in the slot `target` of another rank, too."""

    source: int
    target: int


def place(counts: Sequence[int], num_ranks: int, slots_per_rank: int) -> Placement:
    """Spread experts by their `counts [experts]` of tokens over slots of which there are at least
    as many, and at most one per rank and expert.

    Each expert, the heaviest first, goes to the least loaded rank, as many to each. Then, until all
    slots are taken, the most loaded rank's expert with the most tokens per copy gets one more, on
    the least loaded rank, and its tokens are spread anew so that the largest load of its ranks is
    as small as can be. So no copy makes the largest load larger. Where equal parts for all copies
    do as well, they get these, for other tokens may come.
    """
    ranks = _Ranks(counts, num_ranks, slots_per_rank)
    ranks.give_homes()
    while ranks.have_room():
        ranks.add_copy()
    planned = ranks.placement()
    copies, seen, columns = Counter(planned.slots), Counter[int](), []
    for expert in planned.slots:
        ends = [COLUMNS * (seen[expert] + i) // copies[expert] for i in range(2)]
        columns.append(ends[1] - ends[0])
        seen[expert] += 1
    equal = replace(planned, columns=tuple(columns))
    return equal if max(equal.loads(counts)) <= max(planned.loads(counts)) else planned


class _Ranks:
    """Ranks that are being filled: `columns[rank]` by expert, and their `loads`."""

    def __init__(self, counts: Sequence[int], num_ranks: int, size: int) -> None:
        # Experts without tokens are spread, too: they count, but less than any token.
        self.weights = [count * (COLUMNS * len(counts) + 1) + 1 for count in counts]
        self.size = size
        self.columns: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        self.loads = [0] * num_ranks

    def give_homes(self) -> None:
        most = -(-len(self.weights) // len(self.loads))
        for expert in sorted(range(len(self.weights)), key=lambda e: (-self.weights[e], e)):
            open_ranks = (r for r, held in enumerate(self.columns) if len(held) < most)
            rank = min(open_ranks, key=lambda r: (self.loads[r], len(self.columns[r]), r))
            self.set(rank, expert, COLUMNS)

    def have_room(self) -> bool:
        return any(len(held) < self.size for held in self.columns)

    def add_copy(self) -> None:
        expert, rank = next(self._candidates())
        self.set(rank, expert, 0)
        self.share(expert)

    def _candidates(self) -> Iterator[tuple[int, int]]:
        """Experts to copy and the ranks to copy them to, the best first."""
        copies = Counter(expert for held in self.columns for expert in held)
        copied = [sum(copies[expert] for expert in held) for held in self.columns]
        for rank in sorted(range(len(copied)), key=lambda r: (-self.loads[r], copied[r], r)):
            per_copy = {e: COLUMNS * self.weights[e] // copies[e] for e in self.columns[rank]}
            for expert in sorted(per_copy, key=lambda e: (-per_copy[e], e)):
                targets = [
                    r
                    for r, held in enumerate(self.columns)
                    if len(held) < self.size and expert not in held
                ]
                if targets:
                    yield expert, min(targets, key=lambda r: (self.loads[r], -copied[r], r))

    def share(self, expert: int) -> None:
        """Its parts, one by one, to whichever of its ranks is the least loaded then."""
        holders = [rank for rank, held in enumerate(self.columns) if expert in held]
        for rank in holders:
            self.set(rank, expert, 0)
        for _ in range(COLUMNS):
            rank = min(holders, key=lambda r: (self.loads[r], r))
            self.set(rank, expert, self.columns[rank][expert] + 1)

    def set(self, rank: int, expert: int, columns: int) -> None:
        before = self.columns[rank].get(expert, 0)
        self.columns[rank][expert] = columns
        self.loads[rank] += (columns - before) * self.weights[expert]

    def placement(self) -> Placement:
        pairs = [pair for held in self.columns for pair in sorted(held.items())]
        slots, columns = zip(*pairs, strict=True)
        return Placement(slots, columns, len(self.loads))


def improved(present: Placement, counts: Sequence[int]) -> Placement:
    """The placement for these counts, laid out with few moves from the present one; where it is
    hardly better, the present slots with other columns; the present one where these do not help."""
    planned = place(counts, present.num_ranks, present.slots_per_rank)
    kept = _shared_anew(present, counts)
    least, most = max(planned.loads(counts)), max(kept.loads(counts))
    if 100 * least <= (100 - _LEAST_GAIN) * most:
        return _laid_out(planned, present)
    return kept if most < max(present.loads(counts)) else present


def _shared_anew(present: Placement, counts: Sequence[int]) -> Placement:
    """The tokens of experts, the heaviest first, go to other copies of them."""
    ranks = _Ranks(counts, present.num_ranks, present.slots_per_rank)
    for slot, (expert, columns) in enumerate(zip(present.slots, present.columns, strict=True)):
        ranks.set(slot // present.slots_per_rank, expert, columns)
    copied = [expert for expert, copies in Counter(present.slots).items() if copies > 1]
    for expert in sorted(copied, key=lambda e: (-ranks.weights[e], e)):
        ranks.share(expert)
    shares = (
        ranks.columns[slot // present.slots_per_rank][expert]
        for slot, expert in enumerate(present.slots)
    )
    return replace(present, columns=tuple(shares))


def _laid_out(planned: Placement, present: Placement) -> Placement:
    """The same experts together, on the ranks that have most of them; what stays on a rank keeps
    its slot."""
    size, ranks = present.slots_per_rank, range(present.num_ranks)
    had = [set(present.experts_of(rank)) for rank in ranks]
    pairs = sorted(
        ((group, rank) for group in ranks for rank in ranks),
        key=lambda pair: (-len(had[pair[1]].intersection(planned.experts_of(pair[0]))), *pair),
    )
    group_of: dict[int, int] = {}
    for group, rank in pairs:
        if rank not in group_of and group not in group_of.values():
            group_of[rank] = group
    slots, columns = list(present.slots), list(present.columns)
    for rank, group in group_of.items():
        first = group * size
        shares = dict(
            zip(planned.experts_of(group), planned.columns[first : first + size], strict=True)
        )
        arriving = iter([expert for expert in shares if expert not in had[rank]])
        for slot in range(rank * size, (rank + 1) * size):
            if slots[slot] not in shares:
                slots[slot] = next(arriving)
            columns[slot] = shares[slots[slot]]
    return replace(present, slots=tuple(slots), columns=tuple(columns))


def moves(present: Placement, planned: Placement) -> list[Move]:
    """What ranks send each other: every expert from those that have it, by turns."""
    size = present.slots_per_rank
    sent = [0] * present.num_ranks
    found = []
    for target, (before, expert) in enumerate(zip(present.slots, planned.slots, strict=True)):
        if before != expert:
            sources = [slot for slot, one in enumerate(present.slots) if one == expert]
            source = min(sources, key=lambda slot: (sent[slot // size], slot))
            sent[source // size] += 1
            found.append(Move(source, target))
    return found
