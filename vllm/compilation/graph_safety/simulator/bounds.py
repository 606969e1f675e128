# SPDX-License-Identifier: Apache-2.0
"""Whether what graphs are captured for fits into what steps have: rows, tokens, state memory."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.compilation.graph_safety.simulator.spots import Spot, spot_in
from vllm.compilation.graph_safety.simulator.trace import NotReplayable
from vllm.v1.worker.block_tables import GroupBlockTable
from vllm.v1.worker.graph_plan import GraphPlan, most_sequences, plan_graphs
from vllm.v1.worker.model_runner import ModelRunner


def size_problems(runner: ModelRunner, plan: GraphPlan) -> list[NotReplayable]:
    """Sizes of a plan that are larger than a buffer they are for, with where the plan or the buffer
    is made; the runner has its memory."""
    return [NotReplayable(16, spot, message) for spot, message in _problems(runner, plan)]


def _problems(runner: ModelRunner, plan: GraphPlan) -> Iterator[tuple[Spot, str]]:
    planned = spot_in(plan_graphs, "return GraphPlan(sizes")
    made = GroupBlockTable.__init__
    largest = max(plan.decode_sizes, default=0)
    if largest > runner.max_rows:
        yield planned, f"a graph of {largest} decodes is planned for {runner.max_rows} batch rows"
    held = most_sequences(runner.kv_cache_config, largest)
    if largest > held:
        message = (
            f"a graph of {largest} decodes is planned, the state memory holds {held} sequences"
        )
        yield planned, message
    tokens = max([*plan.piecewise_sizes, *(largest * width for width in plan.widths)])
    if tokens > runner.inputs.max_tokens:
        message = f"a graph of {tokens} tokens is planned, steps have {runner.inputs.max_tokens}"
        yield planned, message
    for index, table in enumerate(runner.block_tables.groups):
        if len(table.slots) < tokens:
            message = f"group {index} has {len(table.slots)} slots, a graph has {tokens} tokens"
            yield spot_in(made, "self.slots ="), message
        if len(table.table) < largest:
            rows = len(table.table)
            message = f"group {index} has block tables of {rows} rows for {largest} decodes"
            yield spot_in(made, "self.table ="), message
