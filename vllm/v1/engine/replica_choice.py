# SPDX-License-Identifier: Apache-2.0
"""Which replica a request goes to: where its first token comes soonest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vllm.v1.engine.replica_board import ReplicaBoard

Reason = Literal["pinned", "prefix", "load"]
REASONS: tuple[Reason, ...] = ("pinned", "prefix", "load")

#: what a token of cached prefix is worth in tokens of waiting: one for the request itself, and one
#: for the others, who would wait for it to be computed again and lose the memory of a second copy
_HIT_WEIGHT = 2
#: tokens of recent work that count as much as one that waits, and how long work is recent: until
#: so many times the replicas' capacity was given out
_WORK_SHARE, _HALF_LIFE_OF_WORK = 6.0, 4.0
#: tokens that a request is expected to generate before any has ended, and how many requests that
#: guess counts for later
_FIRST_GUESS, _WEIGHT_OF_GUESS = 128.0, 8.0
#: requests after which the mean of what they generated has forgotten half of the older ones
_HALF_LIFE = 512


@dataclass(frozen=True)
class Work:
    """What a request asks for. `chain`: keys of its prompt's full blocks, each standing for all
    tokens up to its end, uint64 `[blocks]`; `num_sequences`: completions of the prompt."""

    chain: np.ndarray
    num_prompt_tokens: int
    max_tokens: int
    num_sequences: int = 1


@dataclass(frozen=True)
class Choice:
    """`replica`: its number here; `hit_tokens`: how much of the prompt it is expected to have."""

    replica: int
    reason: Reason
    hit_tokens: int


@dataclass
class _Outstanding:
    """What a sequence still counts for at its replica, in tokens."""

    replica: int
    prompt: int
    output: int


class ReplicaChooser:
    """Counts, in tokens, what each replica has to do, and sends requests where least is ahead of
    their first token.

    What waits at a replica are prompts until their first token comes, and the tokens that a
    sequence is expected to generate until it ends: the mean of those before it, at most its limit.
    From that is taken what the replica has of the request's prompt, twice, so a turn of a
    conversation goes where the earlier ones went unless others have less to do by more than twice
    what would be computed again. A small part of a replica's recent work is added, which evens out
    what conversations of unequal length leave uneven; it is bounded, so none starves.

    `capacities`: tokens of state that each replica holds; what it saw longer ago is forgotten here
    as there. `place`: this front end's row of the board.
    """

    def __init__(
        self, board: ReplicaBoard, capacities: Sequence[int], block_size: int, place: int = 0
    ) -> None:
        self.board = board
        self.use_capacities(capacities)
        self._block_size = block_size
        self._waiting, self._worked = board.waiting[place], board.worked[place]
        self._sequences: dict[str, _Outstanding] = {}
        #: what of the replicas' work is in `_recent`
        self._clocks = board.clocks
        self._recent = np.zeros(board.num_replicas)
        self._generated = _FIRST_GUESS * _WEIGHT_OF_GUESS
        self._ended = _WEIGHT_OF_GUESS

    def use_capacities(self, capacities: Sequence[int]) -> None:
        """From now on the replicas hold so many tokens each."""
        self._capacities = np.array(capacities, np.int64)
        self._work_half_life = _HALF_LIFE_OF_WORK * float(self._capacities.sum())

    def choose(self, work: Work, pinned: int | None = None) -> Choice:
        """The replica for a request; `pinned` decides if it is given."""
        found = self.board.recall(work.chain, self._capacities) * self._block_size
        # The last token is always computed: its logits are what is asked for.
        hits = np.minimum(found, work.num_prompt_tokens - 1)
        if pinned is not None:
            return Choice(pinned, "pinned", int(hits[pinned]))
        cost = self.board.loads - _HIT_WEIGHT * hits + self._recent_work() / _WORK_SHARE
        replica = int(cost.argmin())
        hit = int(hits[replica])
        return Choice(replica, "prefix" if hit else "load", hit)

    def _recent_work(self) -> np.ndarray:
        """Tokens that each replica was given, the older the less `[replicas]`."""
        clocks = self.board.clocks
        new, self._clocks = clocks - self._clocks, clocks
        self._recent = self._recent * 0.5 ** (new.sum() / self._work_half_life) + new
        return self._recent

    def start(self, choice: Choice, work: Work, sequence_ids: Sequence[str]) -> None:
        """The request's sequences are sent there; the first one computes the prompt."""
        self.board.remember(work.chain, choice.replica)
        prompt = work.num_prompt_tokens - choice.hit_tokens
        output = int(min(work.max_tokens, self.expected_output))
        for index, sequence_id in enumerate(sequence_ids):
            own = _Outstanding(choice.replica, 0 if index else prompt, output)
            self._sequences[sequence_id] = own
            self._waiting[choice.replica] += own.prompt + own.output
        self._worked[choice.replica] += prompt

    @property
    def expected_output(self) -> float:
        """Tokens that a sequence generates, as far as is known."""
        return self._generated / self._ended

    def replica_of(self, sequence_id: str) -> int | None:
        """Where it runs; None for one that has ended."""
        one = self._sequences.get(sequence_id)
        return None if one is None else one.replica

    def began(self, sequence_id: str) -> None:
        """Its first token has come: its prompt is computed."""
        one = self._sequences.get(sequence_id)
        if one is not None:
            self._waiting[one.replica] -= one.prompt
            one.prompt = 0

    def generated(self, replica: int, num_tokens: int) -> None:
        """The replica has computed so many tokens."""
        self._worked[replica] += num_tokens
        self._generated += num_tokens

    def ended(self, sequence_id: str) -> None:
        """It has finished, or nobody waits for it any more."""
        one = self._sequences.pop(sequence_id, None)
        if one is None:
            return
        self._waiting[one.replica] -= one.prompt + one.output
        self._ended += 1
        if self._ended > 2 * _HALF_LIFE:
            self._ended /= 2
            self._generated /= 2

    @property
    def loads(self) -> list[int]:
        """Tokens that wait at each replica, over all front ends."""
        loads: list[int] = self.board.loads.tolist()
        return loads
