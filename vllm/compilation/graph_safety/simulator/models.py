# SPDX-License-Identifier: Apache-2.0
"""Steps of a whole model on the CPU, with weights made up: its graphs captured by recording, then
decode, verify and mixed steps replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm.compilation.graph_safety.report import Captured
from vllm.compilation.graph_safety.simulator.addresses import FrozenAddresses
from vllm.compilation.graph_safety.simulator.bounds import size_problems
from vllm.compilation.graph_safety.simulator.checked_graphs import CheckedGraphs
from vllm.compilation.graph_safety.simulator.checked_run import SimulatedGraph
from vllm.compilation.graph_safety.simulator.driver import VARIED, Driver
from vllm.compilation.graph_safety.simulator.functions import REPLAYED, weights_of
from vllm.compilation.graph_safety.simulator.not_finite import layers_not_finite, why_not_finite
from vllm.compilation.graph_safety.simulator.outcomes import first_other, run_steps, step_spot
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.compilation.graph_safety.simulator.trace import NotReplayable
from vllm.compilation.graph_safety.walker import Finding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.current import with_own_layers
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.structured_output.masks import MaskQueue
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import StepGraphs

#: settings of the engine that is checked: room for a few requests of a few pages
ROWS, TOKENS, LENGTH = 8, 64, 128
#: sizes of its graphs; with each width, in tokens
_PIECES = (8, 64)


@dataclass(frozen=True)
class StepsReport:
    """`replays`: how many, by kind and size; `addresses`: tensors that graphs read; `results`: what
    became of each capture."""

    findings: tuple[Finding, ...]
    steps: int
    captures: int
    replays: dict[str, int]
    addresses: tuple[str, ...]
    results: tuple[Captured, ...] = ()

    @property
    def modes(self) -> dict[Finding, str]:
        """Where each finding is."""
        return dict.fromkeys(self.findings, REPLAYED)

    @property
    def summary(self) -> str:
        return (
            f"simulated captures: {self.captures} graphs on the CPU with made-up weights, "
            f"{sum(self.replays.values())} replays in {self.steps} decode, verify and mixed steps, "
            "each compared with eager launches, and the steps with steps without graphs, bit for "
            f"bit; {len(self.addresses)} addresses that graphs read were looked at"
        )


def check_steps(
    vllm_config: VllmConfig, steps: int, progress: Callable[[str], None] = lambda name: None
) -> StepsReport:
    """Run `steps` steps of a configuration with `ROWS`, `TOKENS` and `LENGTH` as its limits and one
    worker; `progress` is called for each. `load_format` "dummy" makes weights up.

    Raises ValueError for what a runner refuses on this platform, which must be the CPU.
    """
    config, masks = with_own_layers(vllm_config), MaskQueue()
    with torch.no_grad(), set_current_vllm_config(config):
        runner = ModelRunner(config, torch.device("cpu"), masks.receive)
        runner.build_model()
        runner.load_weights()
        return check_runner(runner, steps, progress, masks=masks)


def check_runner(
    runner: ModelRunner,
    steps: int,
    progress: Callable[[str], None] = lambda name: None,
    *,
    recorder_of: type[Recorder] = Recorder,
    graph: type[SimulatedGraph] = SimulatedGraph,
    without_graphs: bool = True,
    masks: MaskQueue | None = None,
) -> StepsReport:
    """The same for a runner whose model has its weights; its memory is made here. What records and
    what captures is the CPU's, or a GPU's for a runner there (`device.captured_graph`).
    `without_graphs`: compare with steps without them, too, which nothing pads: where bits do not
    depend on the batch. `masks`: where the runner takes token masks from."""
    driver = Driver(runner, sampling=VARIED, masks=masks)
    recorder = recorder_of(weights_of(*runner.models))
    plan = plan_of(runner)
    for problem in size_problems(runner, plan):
        recorder.report(problem.hazard, problem.spot, problem.message)
    graphs = CheckedGraphs(runner, plan, recorder, graph)
    runner.graphs = graphs
    addresses = FrozenAddresses([checked.trace for checked in graphs.captures], owners(runner))
    found = addresses.without_owner()
    replayed = run_steps(runner, driver, steps, progress)
    for one in addresses.moved():
        # It has a name, and is no tensor that each step makes.
        recorder.report_instead(22, one.hazard, one.spot, one.message)
    overflown = layers_not_finite(runner, driver)
    recorder.check_after()
    runner.graphs = StepGraphs()
    driver.restart()
    found += why_not_finite(runner, driver, overflown, steps)
    # With another finding a difference is that hazard's.
    found_nothing = not recorder.findings and not found
    if without_graphs and get_world_group().all_agree(found_nothing):
        difference = first_other(replayed, run_steps(runner, driver, steps, progress))
        driver.restart()
        if difference is not None:
            found.append(NotReplayable(22, step_spot(), f"{difference} than without graphs"))
    for one in found:
        recorder.report_once(one.hazard, one.spot, one.message)
    return StepsReport(
        tuple(recorder.findings),
        steps,
        len(graphs.captures),
        dict(graphs.size.replays),
        tuple(addresses.names),
        tuple(result for one in graphs.sets for result in one.results),
    )


def owners(runner: ModelRunner) -> dict[str, object]:
    """What holds the tensors that a runner's graphs read."""
    return {
        "model": runner.models,
        "inputs": runner.inputs,
        "block_tables": runner.block_tables,
        "metadata": runner.groups,
        "arena": runner.arena,
        "journals": runner.journals,
        "drafter": runner.drafter,
        "hidden_states": runner.capture,
        "stage": runner.stage,
    }


def plan_of(runner: ModelRunner) -> GraphPlan:
    """Every power of two up to the rows there are, for each width those that an engine captures of
    them; two sizes in pieces."""
    sizes = [1 << i for i in range(runner.max_rows.bit_length()) if 1 << i <= runner.max_rows]
    pieces = [size for size in _PIECES if size <= runner.inputs.max_tokens]
    backends = [runner.layers[g.layer_names[0]].get_attn_backend() for g in runner.groups]
    limits = [b.max_prefills_in_graph for b in backends if b.max_prefills_in_graph is not None]
    return GraphPlan(sizes, pieces, min(limits, default=None), runner.widths)
