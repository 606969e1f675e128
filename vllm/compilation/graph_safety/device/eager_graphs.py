# SPDX-License-Identifier: Apache-2.0
"""Steps padded as captures pad them and launched one kernel after another, to compare with."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.graph_set import GraphSet, Prepare
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import Replay, StepGraphs


class EagerGraphs(StepGraphs):
    """Pads as `captured` does and launches what it recorded. The drafter loses its graphs."""

    def __init__(self, runner: ModelRunner, captured: StepGraphs) -> None:
        super().__init__()
        self._steps, self._captured = runner.padded_steps(), captured
        self._runs: dict[Replay, Callable[[], Tensor]] = {}
        if runner.drafter is not None:
            runner.drafter.graph_sets(GraphPlan([], []), _no_graphs)

    def replay_for(self, shape: StepShape) -> Replay | None:
        """What `captured` would replay; made ready here, before the step fills its arrays."""
        chosen = self._captured.replay_for(shape)
        if chosen is not None and chosen not in self._runs:
            make = self._steps.decodes if chosen.whole else self._steps.in_context
            self._runs[chosen] = make(chosen.size, chosen.width)
        return chosen

    def replay(self, chosen: Replay) -> Tensor:
        return self._runs[chosen]()


def _no_graphs(sizes: list[int], prepare: Prepare) -> GraphSet:
    raise RuntimeError("there is nothing to capture")
