# SPDX-License-Identifier: Apache-2.0
"""Planted hazards on a GPU and without one: both name the same item of the checklist on the same
line, and find nothing in what is clean."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from tiny_models import tiny_model

from tests.compilation.graph_safety.samples import replayed
from tests.compilation.graph_safety.samples.replayed_steps import (
    BRANCH,
    PLANTS,
    Between,
    Plant,
    Reading,
)
from tests.compilation.graph_safety.test_planted import SAMPLES, expected
from tests.compilation.graph_safety.test_replayed import Clean, lines_of
from vllm.compilation.graph_safety.device.captured_graph import CapturedGraph, DeviceRecorder
from vllm.compilation.graph_safety.device.checks import check_devices, compare_steps
from vllm.compilation.graph_safety.device.functions import check_graphs
from vllm.compilation.graph_safety.device.run import DeviceRun
from vllm.compilation.graph_safety.device.sync_trap import CurrentStream, waits_trapped
from vllm.compilation.graph_safety.simulator.driver import Driver
from vllm.compilation.graph_safety.simulator.functions import check_replays
from vllm.compilation.graph_safety.simulator.models import StepsReport, check_runner
from vllm.compilation.graph_safety.walker import Finding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.current import with_own_layers
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.testing.graph_safety import assert_replays
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.warm_up import warm_up

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
#: samples by what the GPU itself shows, beside the notes on what was launched: a replay of a graph
#: computes something else than the launches do
STALE = frozenset({"BranchOnHost", "CountedSteps", "Grows", "Freed", "Replaced", "HandsOn"})
#: they read memory that was given back: what it holds is chance
CHANCE = frozenset({"Break", "Refilled"})
#: the host waits, or the GPU refuses to be waited for, so that nothing can be captured
NOT_CAPTURED = frozenset(
    {"Reads", "DataShapes", "PerExpert", "Branches", "NewInputs", "LeavesEarly", "Gathers"}
    | {"PythonElement", "Converges", "Samples", "Plans", "ChangesDevice", "Synchronizes", "Tunes"}
)
#: they call kernels, here the GPU's: test_replayed.py simulates them
OWN_KERNELS = frozenset({"Broadcast"})


def _places(findings: Iterable[Finding]) -> set[tuple[str, int, int]]:
    return {(finding.path, finding.line, finding.hazard) for finding in findings}


_CASES = [type(case.module).__name__ for case in replayed.cases()]


@pytest.mark.parametrize("name", _CASES)
def test_the_same_verdict_on_functions(name: str) -> None:
    on_cpu, on_gpu = (
        next(c for c in replayed.cases(where) if type(c.module).__name__ == name)
        for where in ("cpu", "cuda")
    )
    try:
        real = check_graphs(on_gpu.module, on_gpu.steps, split=on_gpu.split, between=on_gpu.before)
    finally:
        torch.cuda.set_device(DEVICE)
    own, path = lines_of(on_gpu.module), SAMPLES / "replayed.py"
    planted = {(str(path), line, hazard) for line, hazard in expected(path) if line in own}
    assert _places(real.findings) == planted
    if name not in OWN_KERNELS:
        simulated = check_replays(
            on_cpu.module, on_cpu.steps, split=on_cpu.split, between=on_cpu.before
        )
        assert _places(simulated.findings) == planted
    assert real.captured == (name not in NOT_CAPTURED)
    assert (real.stale > 0) == (name in STALE) or name in CHANCE


@pytest.mark.parametrize("split", [False, True])
def test_what_is_clean_on_both(split: bool) -> None:
    with torch.device(DEVICE):
        module = Clean()
    steps = [[tensor.to(DEVICE) for tensor in step] for step in replayed.steps()]
    report = check_graphs(module, steps, split=split)
    assert (report.findings, report.captured, report.stale) == ((), True, 0)
    assert assert_replays(module, steps, split=split).checks[0].endswith("0 differ")
    assert check_replays(Clean(), replayed.steps(), split=split).is_clean


def test_the_same_line_waits_on_a_busy_stream() -> None:
    """What the host calls says to the simulator that it waits; the GPU shows it."""
    (case,) = (c for c in replayed.cases("cuda") if isinstance(c.module, replayed.Synchronizes))
    lines = {line for line, hazard in expected(SAMPLES / "replayed.py") if hazard == 14}
    with waits_trapped(CurrentStream()) as waits:
        case.module(*case.steps[0])
    assert waits.spot is not None
    found = waits.spot.finding(14, "")
    assert (found.path, found.line) == (str(SAMPLES / "replayed.py"), max(lines))


# ---- whole steps ---------------------------------------------------------------------------------


def _config() -> VllmConfig:
    args = EngineArgs(
        model=str(tiny_model("llama", torch.bfloat16)),
        load_format="dummy",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    return args.create_engine_config()


@contextmanager
def _planted(plant: Plant | None) -> Iterator[tuple[ModelRunner, Between]]:
    """A runner with a hazard, on a stream of its own."""
    config = with_own_layers(_config())
    stream = torch.cuda.stream(torch.cuda.Stream(DEVICE))
    with torch.no_grad(), set_current_vllm_config(config), stream:
        runner = ModelRunner(config, DEVICE)
        runner.build_model()
        runner.load_weights()
        with nullcontext(lambda name: None) if plant is None else plant.apply(runner) as between:
            yield runner, between
        torch.cuda.synchronize()


def _verdict(plant: Plant | None) -> StepsReport:
    """Of CUDA graphs in the place of the simulator's."""
    with _planted(plant) as (runner, between):
        steps = 8 if plant is None else plant.steps
        return check_runner(runner, steps, between, recorder_of=DeviceRecorder, graph=CapturedGraph)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.apply.__name__)
def test_the_same_verdict_on_steps(plant: Plant) -> None:
    """Those of the CPU: tests/compilation/graph_safety/test_model_steps.py."""
    report = _verdict(plant)
    assert _places(report.findings) == {plant.place}
    assert any(plant.message in finding.message for finding in report.findings)
    gc.collect()


@pytest.mark.parametrize("plant", [*PLANTS, None], ids=lambda p: p and p.apply.__name__)
def test_the_command_says_the_same(plant: Plant | None) -> None:
    """Of graphs as the engine captures them; what is stale in a whole step is told by its line."""
    run = DeviceRun()
    in_use = partial(torch.cuda.memory_allocated, DEVICE)
    with _planted(plant) as (runner, between):
        driver = Driver(runner)
        warm_up(runner)
        compare_steps(runner, run, driver, 8, between, in_use, located=4)
    assert _places(run.findings) == (set() if plant is None else {plant.place})
    gc.collect()


def test_a_branch_that_no_gpu_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole check, as the command runs it."""
    load = ModelRunner.load_weights

    def planted(runner: ModelRunner) -> None:
        load(runner)
        model = runner.model
        assert isinstance(model, DecoderForCausalLM)
        model.model.embed_tokens = Reading(model.model.embed_tokens)  # type: ignore[assignment]

    monkeypatch.setattr(ModelRunner, "load_weights", planted)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (found,) = check_devices(_config(), 0).findings
    assert (found.path, found.line, found.hazard) == BRANCH.place


def test_clean_steps_on_a_gpu() -> None:
    report = _verdict(None)
    assert report.findings == () and report.captures > 0 and sum(report.replays.values()) >= 7
