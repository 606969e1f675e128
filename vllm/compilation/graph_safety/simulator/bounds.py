# SPDX-License-Identifier: Apache-2.0
"""Whether what graphs are captured for fits into what steps have: rows, tokens, state memory."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.compilation.graph_safety.simulator.spots import Spot
from vllm.compilation.graph_safety.simulator.trace import NotReplayable
from vllm.v1.worker.graph_plan import GraphPlan, most_sequences, plan_graphs
from vllm.v1.worker.model_runner import ModelRunner


def size_problems(runner: ModelRunner, plan: GraphPlan) -> list[NotReplayable]:
    """Sizes of a plan that are larger than a buffer they are for; the runner has its memory."""
    spot = Spot(plan_graphs.__code__, 0, plan_graphs.__module__)
    return [NotReplayable(16, spot, message) for message in _problems(runner, plan)]


def _problems(runner: ModelRunner, plan: GraphPlan) -> Iterator[str]:
    largest = max(plan.decode_sizes, default=0)
    if largest > runner.max_rows:
        yield f"a graph of {largest} decodes is planned for {runner.max_rows} batch rows"
    held = most_sequences(runner.kv_cache_config, largest)
    if largest > held:
        yield f"a graph of {largest} decodes is planned, the state memory holds {held} sequences"
    tokens = max([*plan.piecewise_sizes, *(largest * width for width in plan.widths)])
    if tokens > runner.inputs.max_tokens:
        yield f"a graph of {tokens} tokens is planned, steps have {runner.inputs.max_tokens}"
    for index, table in enumerate(runner.block_tables.groups):
        if len(table.slots) < tokens:
            yield f"group {index} has {len(table.slots)} slots, a graph has {tokens} tokens"
        if len(table.table) < largest:
            yield f"group {index} has block tables of {len(table.table)} rows for {largest} decodes"
