# SPDX-License-Identifier: Apache-2.0
"""Which copy of an expert a token goes to, decided on the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.exceptions import VLLMValidationError
from vllm.kernels.moe import Routing
from vllm.model_executor.layers.expert_placement import COLUMNS, Placement, place

#: spreads the low bits of a number over the next ones; an odd number, so small that no sum of
#: 32-bit numbers that a router may give overflows
_FACTOR, _SHIFT = 0x1E3779, 22


class ExpertCopies(nn.Module):
    """`slots [experts + 1, 64]` int32: the slot of each part of an expert's tokens; the last row is
    the shared expert's, which has none. It keeps its address when `adopt` changes the placement, so
    graphs that read it stay valid.

    Raises VLLMValidationError where `num_ranks` cannot have equally many slots.
    """

    slots: Tensor

    def __init__(self, num_experts: int, num_redundant: int, num_ranks: int) -> None:
        super().__init__()
        total, most = num_experts + num_redundant, num_experts * num_ranks
        if total % num_ranks or total > most:
            raise VLLMValidationError(
                f"--eplb-config: num_redundant_experts {num_redundant} with {num_experts} experts "
                f"gives {total} for {num_ranks} ranks, which have equally many and none of them "
                f"twice; choose {-num_experts % num_ranks} or that and a multiple of {num_ranks}, "
                f"up to {most - num_experts}",
                "num_redundant_experts",
                num_redundant,
            )
        #: what the slots hold
        self.placement = place([0] * num_experts, num_ranks, total // num_ranks)
        rows = [*self.placement.table(), [-1] * COLUMNS]
        self.register_buffer("slots", torch.tensor(rows, dtype=torch.int32), persistent=False)

    def adopt(self, placement: Placement) -> None:
        """Use another placement of the same experts from the next step on; no step is running."""
        self.placement = placement
        table = torch.tensor(placement.table(), dtype=torch.int32, device="cpu")
        self.slots[:-1].copy_(table)

    def choose(self, routing: Routing, logits: Tensor, first: int) -> Routing:
        """`routing`, whose experts are numbers, with slots instead, counted from `first` on.

        The part that a token belongs to follows from the bits of its `logits [tokens, columns]`:
        from nothing else in the batch, and on all ranks that have the token alike.
        """
        bits = logits.float().view(torch.int32).sum(1, dtype=torch.int64)
        column = (bits * _FACTOR >> _SHIFT) % COLUMNS
        slots = self.slots[routing.experts.long(), column[:, None]]
        return Routing(routing.weights, slots - first)
