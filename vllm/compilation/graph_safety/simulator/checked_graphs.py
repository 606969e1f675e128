# SPDX-License-Identifier: Apache-2.0
"""A runner's graphs, captured on the CPU; each replay is compared with eager launches."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vllm.compilation.graph_safety.report import Captured
from vllm.compilation.graph_safety.simulator.checked_run import CheckedRun, Run, SimulatedGraph
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.compilation.piecewise import Graph
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.graph_set import GraphSet, Prepare
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import Replay, StepGraphs

#: what guarded memory holds while steps of padding are captured: finite in every dtype
_SENTINEL = 60


@dataclass
class StepSize:
    """What of the running step is real, and how many replays there were of which size."""

    tokens: int = 0
    requests: int = 0
    replays: Counter[str] = field(default_factory=Counter)


class CheckedGraphSet(GraphSet):
    """Captures by recording. `rows`: how many rows of a result are real in the running step;
    `eager(size)`: makes what a replay is compared with (None: what was captured). `guarded`: memory
    by name that a step of padding may not touch. `unused()`: memory that holds nothing after the
    running step."""

    def __init__(
        self,
        name: str,
        sizes: list[int],
        prepare: Prepare,
        recorder: Recorder,
        rows: Callable[[], int],
        counter: Counter[str],
        guarded: Mapping[str, Tensor],
        *,
        split: bool = False,
        eager: Callable[[int], Run] | None = None,
        unused: Callable[[], Sequence[Tensor]] = tuple,
        graph: type[SimulatedGraph] = SimulatedGraph,
    ) -> None:
        super().__init__(sizes, prepare, _no_graph, split=split)
        self._graph = graph
        self._name, self._recorder, self._rows = name, recorder, rows
        self._counter, self._guarded, self._eager = counter, guarded, eager
        self._unused = unused
        self._checked: dict[int, tuple[CheckedRun, Run]] = {}

    @property
    def captures(self) -> list[CheckedRun]:
        return [checked for checked, _ in self._checked.values()]

    @property
    def results(self) -> list[Captured]:
        """What became of each size."""
        return [one.result(f"{self._name} of {n}") for n, (one, _) in self._checked.items()]

    def captured(self, size: int) -> CheckedRun:
        """The capture of a size."""
        return self._checked[size][0]

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Record a pending size. It runs once before, as in a real capture: what is made at the
        first use is then there."""
        eager = None if self._eager is None else self._eager(size)
        run = self._prepare(size)
        run()
        for tensor in self._guarded.values():
            tensor.view(torch.uint8).fill_(_SENTINEL)
        checked = CheckedRun(
            run, self._recorder, split=self._split, guarded=self._guarded, graph=self._graph
        )
        self._checked[size] = (checked, run if eager is None else eager)
        self.pending.remove(size)
        insort(self.sizes, size)

    def replay(self, size: int) -> Tensor:
        checked, run = self._checked[size]
        self._counter[f"{self._name} of {size}"] += 1
        result: Tensor = checked.step(run, self._rows(), self._unused())
        return result


def _no_graph() -> Graph:
    raise RuntimeError("a simulated capture makes its own graphs")


class CheckedGraphs(StepGraphs):
    """All graphs of a runner by a plan, captured by `graph`; `recorder` collects the findings."""

    def __init__(
        self,
        runner: ModelRunner,
        plan: GraphPlan,
        recorder: Recorder,
        graph: type[SimulatedGraph] = SimulatedGraph,
    ) -> None:
        self.size = size = StepSize()
        steps = runner.padded_steps()
        guarded = {"the state memory": runner.arena.buffer}
        if runner.journals is not None:
            tensors = enumerate(runner.journals.tensors)
            guarded |= {f"journal tensor {index}": tensor for index, tensor in tensors}
        checked = partial(
            CheckedGraphSet,
            recorder=recorder,
            counter=size.replays,
            guarded=guarded,
            unused=lambda: () if runner.drafter is None else runner.drafter.unused(size.tokens),
            graph=graph,
        )
        of_tokens = partial(checked, rows=lambda: size.tokens)
        self.sets: list[CheckedGraphSet] = []

        def decodes(width: int) -> CheckedGraphSet:
            name = f"decodes of {width} tokens, batch"
            sizes = plan.decode_sizes_of(width)
            return of_tokens(name, sizes, partial(steps.decodes, width=width))

        def pieces(width: int) -> CheckedGraphSet:
            return of_tokens(
                f"pieces beside decodes of {width} tokens, tokens",
                plan.piecewise_sizes_of(width),
                partial(steps.tokens, width=width),
                split=True,
                eager=partial(steps.in_context, width=width),
            )

        def drafts(sizes: list[int], prepare: Prepare) -> CheckedGraphSet:
            made = checked("drafts, batch", sizes, prepare, rows=lambda: size.requests)
            self.sets.append(made)
            return made

        by_width = {width: decodes(width) for width in plan.widths}
        in_pieces = {width: pieces(width) for width in plan.widths}
        self.sets += [*by_width.values(), *in_pieces.values()]
        others = [] if runner.drafter is None else runner.drafter.graph_sets(plan, drafts)
        super().__init__(by_width, in_pieces, plan.max_prefills, others)
        while self.capture_next():
            pass
        for tensor in guarded.values():
            tensor.zero_()

    @property
    def captures(self) -> list[CheckedRun]:
        return [checked for graphs in self.sets for checked in graphs.captures]

    def replay_for(self, shape: StepShape) -> Replay | None:
        self.size.tokens, self.size.requests = shape.num_tokens, shape.num_reqs
        return super().replay_for(shape)
