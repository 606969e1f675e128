# SPDX-License-Identifier: Apache-2.0
"""What replicas that share experts send each other in a mixture layer: rows there, sums back.

Every rank gets the rows of all replicas, with the experts that each row chose, runs those that it
has, and sends each replica its part of the sum. All replicas have as many rows, the step's
`exchange_rows`, whatever they choose: sending rows to the ranks of their experts alone would take
counts that only the device knows, and the host would have to wait for them in every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import get_forward_context
from vllm.kernels.moe import Routing


class ExpertExchange:
    """`replicas`: the ranks that have the same place in each replica. `first`: number of the first
    expert, or slot, that this rank has; places in its stack count from there."""

    def __init__(self, replicas: GroupCoordinator, first: int) -> None:
        self._replicas = replicas
        self._first = first

    def gather(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """`x [tokens, width]` and the choices, by number, of all replicas, one after the
        other: `[replicas * exchange_rows, ...]`. Rows past a replica's tokens choose no expert."""
        missing = get_forward_context().exchange_rows - len(x)
        weights, experts = routing.weights.view(torch.int32), routing.experts
        if missing:
            x, weights = pad(x, (0, 0, 0, missing)), pad(weights, (0, 0, 0, missing))
            experts = pad(experts, (0, 0, 0, missing), value=-1)
        x = self._replicas.all_gather(x, dim=0)
        choices = self._replicas.all_gather(torch.cat([weights, experts], 1), dim=0)
        weights, experts = choices.chunk(2, dim=1)
        weights = weights.contiguous().view(torch.float32)
        return x, Routing(weights, experts - self._first)

    def scatter(self, out: Tensor, num_tokens: int) -> Tensor:
        """Of what the experts of all ranks gave, `out [replicas * exchange_rows, width]`, the sums
        of this replica's `num_tokens` rows."""
        return self._replicas.reduce_scatter(out)[:num_tokens]
