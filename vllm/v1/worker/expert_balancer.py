# SPDX-License-Identifier: Apache-2.0
"""Experts move between ranks, as the tokens of the last steps ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.expert_placement import Move, Placement, improved, moves
from vllm.model_executor.layers.moe import MixtureOfExperts, mixtures_of

#: device memory for what arrives, until all that it replaces has been sent
_STAGED_BYTES = 32 * 2**20
#: of pieces that are sent
_ALIGNMENT = 16


class ExpertBalancer:
    """The mixtures of some models whose experts are spread over `group`. All its ranks call the
    methods after the same step, while none is running."""

    def __init__(self, models: Iterable[nn.Module], group: GroupCoordinator) -> None:
        found = {id(one): one for model in models for one in mixtures_of(model)}
        self._mixtures = [one for one in found.values() if one.copies is not None]
        self._group = group
        self._start: Tensor | None = None
        #: by layer, that of the last window's tokens before and after the last rearrangement
        self.balancedness: dict[str, list[float]] = {}

    def begin_window(self) -> None:
        """Tokens from here on decide the next rearrangement, those before do not."""
        if self._mixtures:
            self._start = self._counts()

    @torch.inference_mode()
    def rearrange(self) -> None:
        """Place every layer's experts by the window's tokens of all ranks, where that is better.
        Waits for the device. A pipeline stage may have nothing to do."""
        if not self._mixtures:
            return
        counts = self._counts()
        if self._start is not None:
            counts -= self._start
        # The sum is the same on all ranks, and so is what they make of it.
        tokens = self._group.all_reduce(counts).tolist()
        for mixture in self._mixtures:
            size = mixture.shape.num_experts
            own, tokens = tokens[:size], tokens[size:]
            assert mixture.copies is not None
            before = mixture.copies.placement
            after = improved(before, own)
            if after != before:
                _rearrange(mixture, after, self._group)
            found = [one.balancedness(own) for one in (before, after)]
            self.balancedness[mixture.layer_name] = found

    def _counts(self) -> Tensor:
        """Of all layers, one after the other."""
        return torch.cat([one.counts for one in self._mixtures if one.counts is not None])


def _rearrange(mixture: MixtureOfExperts, placement: Placement, group: GroupCoordinator) -> None:
    copies, experts = mixture.copies, mixture.experts
    assert copies is not None
    made = moves(copies.placement, placement)
    for param in experts.parameters():
        move_slots(param.data, made, group)
    experts.stack.experts = placement.experts_of(group.rank_in_group)
    copies.adopt(placement)


def move_slots(stack: Tensor, made: Sequence[Move], group: GroupCoordinator) -> None:
    """Make the moves of one tensor of a mixture's stack `[slots, ...]`, contiguous, of which each
    rank has equally many.

    A slot may be source and target. So all ranks take the same piece of every slot at a time, and
    store what has arrived when all has been sent.
    """
    size, own = len(stack), group.rank_in_group
    rows = stack.view(size, -1).view(torch.uint8)
    sends = [(one.source % size, one.target // size) for one in made if one.source // size == own]
    arrivals = [
        (one.target % size, one.source // size) for one in made if one.target // size == own
    ]
    pieces = max(1, _STAGED_BYTES // size // _ALIGNMENT)
    for piece in rows.split(pieces * _ALIGNMENT, dim=1):
        staged = piece.new_empty(len(arrivals), piece.shape[1])
        group.exchange(
            [(piece[slot], rank) for slot, rank in sends],
            [(staged[i], rank) for i, (_, rank) in enumerate(arrivals)],
        )
        for arrived, (slot, _) in zip(staged, arrivals, strict=True):
            piece[slot].copy_(arrived)
