# SPDX-License-Identifier: Apache-2.0
"""Steps of padding, as graphs record them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.compilation.piecewise import DeviceGraph
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.v1.spec_decode.drafter import Drafter
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.graph_set import GraphSet
from vllm.v1.worker.state_journals import StateJournals
from vllm.v1.worker.step_graphs import Replay, StepGraphs
from vllm.v1.worker.step_inputs import StepInputBuilder, StepInputs
from vllm.v1.worker.step_metadata import StepMetadata


class PaddedSteps:
    """Makes steps without a real token. `forward`: a step's hidden states `[tokens, hidden]`;
    `head`: their logits; inside `briefly()` layers that launch what others do are left out."""

    def __init__(
        self,
        inputs: StepInputBuilder,
        metadata: StepMetadata,
        tables: BlockTables,
        journals: StateJournals | None,
        forward: Callable[[StepInputs], Tensor],
        head: Callable[[Tensor], Tensor],
        briefly: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._inputs, self._metadata = inputs, metadata
        self._tables, self._journals = tables, journals
        self._forward, self._head, self._briefly = forward, head, briefly

    def tokens(
        self, size: int, num_reqs: int = 0, width: int = 1, exchange_rows: int | None = None
    ) -> Callable[[], Tensor]:
        """Uploads a step of `size` tokens, whose decodes have `width`; the result runs it and
        returns the hidden states. `exchange_rows`: of each replica, `size` if absent."""
        inputs, context = self._upload(size, num_reqs, width)
        if exchange_rows is not None:
            context.exchange_rows = exchange_rows

        def run() -> Tensor:
            with set_forward_context(context):
                return self._forward(inputs)

        return run

    def _upload(self, size: int, num_reqs: int, width: int) -> tuple[StepInputs, ForwardContext]:
        order, inputs = self._inputs.padding(size, num_reqs, width)
        context = self._metadata.of_padding(inputs)
        journal = None if self._journals is None else self._journals.no_step()
        self._inputs.prepare(order, inputs, self._tables.paged, journal)
        return inputs, context

    def replay(self, graphs: StepGraphs, chosen: Replay) -> None:
        """What other replicas replay for their tokens, for padding alone."""
        num_reqs = chosen.size if chosen.whole else 0
        _, context = self._upload(chosen.num_tokens, num_reqs, chosen.width)
        with set_forward_context(context):
            graphs.replay(chosen)

    def decodes(self, size: int, width: int = 1) -> Callable[[], Tensor]:
        """As `tokens`, for `size` decodes; the result returns their logits."""
        run = self.tokens(size * width, size, width)
        return lambda: self._head(run())

    def in_context(self, size: int, width: int = 1) -> Callable[[], Tensor]:
        """Runs the model on `size` tokens in the forward context of the caller: what a replay in
        pieces does, without graphs."""
        inputs = self._inputs.padding(size, 0, width)[1]
        self._tables.flush()
        return lambda: self._forward(inputs)

    def graphs(self, plan: GraphPlan, drafter: Drafter[Any] | None = None) -> StepGraphs:
        """Graphs of these steps, none of them captured yet, and of what `drafter` runs besides."""
        if not plan.sizes:
            return StepGraphs()
        new_graph = partial(DeviceGraph, torch.cuda.graph_pool_handle())
        graph_set = partial(GraphSet, new_graph=new_graph, briefly=self._briefly)

        def whole(width: int) -> GraphSet:
            prepare = partial(self.decodes, width=width)
            return graph_set(plan.decode_sizes_of(width), prepare, split=False)

        def pieces(width: int) -> GraphSet:
            prepare = partial(self.tokens, width=width)
            return graph_set(plan.piecewise_sizes_of(width), prepare, split=True)

        return StepGraphs(
            {width: whole(width) for width in plan.widths},
            {width: pieces(width) for width in plan.widths},
            plan.max_prefills,
            drafter.graph_sets(plan, partial(graph_set, split=False)) if drafter else (),
        )
