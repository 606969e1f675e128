# SPDX-License-Identifier: Apache-2.0
"""A model's steps on GPUs: captured on a stream of their own, watched, replayed and compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vllm.compilation.graph_safety.device.allocations import allocations_noted
from vllm.compilation.graph_safety.device.captured_graph import DeviceRecorder
from vllm.compilation.graph_safety.device.eager_graphs import EagerGraphs
from vllm.compilation.graph_safety.device.sync_trap import (
    BusyStream,
    CurrentStream,
    torch_waits_raise,
    waits_trapped,
)
from vllm.compilation.graph_safety.simulator.driver import Driver
from vllm.compilation.graph_safety.simulator.functions import weights_of
from vllm.compilation.graph_safety.simulator.outcomes import (
    Outcome,
    first_other,
    not_finite,
    run_steps,
    step_spot,
)
from vllm.compilation.graph_safety.simulator.spots import spot_of_error
from vllm.compilation.graph_safety.walker import Finding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.current import with_own_layers
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import StepGraphs
from vllm.v1.worker.warm_up import warm_up

Progress = Callable[[str], None]
#: steps before anything is watched, and steps that are
_WARM, _WATCHED = 40, 64
#: steps on a stream that is kept busy, half a second each
_TRAPPED = 8
#: steps that are replayed at least
LONG_RUN = 512


@dataclass(frozen=True)
class DevicesReport:
    """What was found on `devices` GPUs in `steps` steps each."""

    findings: tuple[Finding, ...]
    devices: int
    steps: int

    @property
    def summary(self) -> str:
        return (
            f"on {self.devices} GPU(s): graphs captured on a stream of their own, {_WATCHED} "
            "decode, verify and mixed steps with waits of torch as errors and the allocator "
            f"watched, {_TRAPPED} on a busy stream, and {self.steps} replayed twice and compared "
            "with the same launches without graphs, bit for bit"
        )


def check_devices(
    vllm_config: VllmConfig, steps: int, progress: Progress = lambda name: None
) -> DevicesReport:
    """Check every visible GPU in turn, with `LONG_RUN` steps at least. `load_format` "dummy" makes
    weights up."""
    steps = max(steps, LONG_RUN)
    count = torch.cuda.device_count()
    found: dict[Finding, None] = {}
    for index in range(count):
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            found |= dict.fromkeys(_check_device(vllm_config, device, steps, progress))
    torch.cuda.set_device(0)
    return DevicesReport(tuple(found), count, steps)


def _check_device(
    vllm_config: VllmConfig, device: torch.device, steps: int, progress: Progress
) -> list[Finding]:
    config = with_own_layers(vllm_config)
    with torch.no_grad(), set_current_vllm_config(config):
        runner = ModelRunner(config, device)
        runner.build_model()
        runner.load_weights()
        driver = Driver(runner)
        try:
            with empty_graphs_raise():
                warm_up(runner)
        except (RuntimeError, UserWarning) as error:
            return [_failed_capture(runner, driver, device, error)]
        found = watched_steps(runner, driver, device, CurrentStream(), progress)
        found += found or replayed_steps(runner, driver, steps, progress)
        runner.close()
    return found


def _failed_capture(
    runner: ModelRunner, driver: Driver, device: torch.device, error: BaseException
) -> Finding:
    """What the line that no capture went past does in an eager step says which item it is; where it
    does nothing of the kind, the capture itself is wrong."""
    found = spot_of_error(error).finding(13, f"capture failed on {device}: {error}")
    runner.graphs = StepGraphs()
    recorder = DeviceRecorder(weights_of(*runner.models))
    with recorder.recording(undone=False):
        recorder.begin_segment()
        driver.step()
    place = (found.path, found.line)
    same = (one for one in recorder.findings if (one.path, one.line) == place)
    return next(same, found)


@contextmanager
def empty_graphs_raise() -> Iterator[None]:
    """Inside the block a graph that nothing was captured into is an error: work went to another
    stream or device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA Graph is empty.*")
        yield


def watched_steps(
    runner: ModelRunner,
    driver: Driver,
    device: torch.device,
    stream: BusyStream,
    progress: Progress,
) -> list[Finding]:
    """Steps that may not wait, allocate or compile; the first that waits is the last."""
    from vllm.kernels.triton import compile_log

    compile_log.install()
    _steps(driver, _WARM, progress)
    compiled = len(compile_log.compiled())
    plain, found = driver.launch, list[Finding]()

    def strictly(output: SchedulerOutput) -> None:
        with torch_waits_raise():
            runner.execute_model(output)
        torch.cuda.synchronize(device)

    def trapped(output: SchedulerOutput) -> None:
        with waits_trapped(stream) as waits:
            runner.execute_model(output)
        torch.cuda.synchronize(device)
        if waits.spot is not None:
            found.append(waits.spot.finding(14, "the host waits here for a busy stream"))

    try:
        driver.launch = strictly
        with allocations_noted(device) as allocated:
            _steps(driver, _WATCHED, progress)
        found += allocated
        driver.launch = trapped
        _steps(driver, _TRAPPED, progress)
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        found.append(spot_of_error(error).finding(1, f"torch: {error}"))
        return found
    finally:
        driver.launch = plain
    new = compile_log.compiled()[compiled:]
    if new:
        message = f"compiled in a steady step: {', '.join(sorted(set(new)))}"
        found.append(step_spot().finding(25, message))
    return found


def replayed_steps(
    runner: ModelRunner, driver: Driver, steps: int, progress: Progress
) -> list[Finding]:
    """Steps with graphs, twice, and without; every step must end with the same bits."""
    runs: list[list[Outcome]] = []
    captured = runner.graphs
    for graphs in (captured, captured, None):
        runner.graphs = EagerGraphs(runner, captured) if graphs is None else graphs
        driver.restart()
        runs.append(run_steps(runner, driver, steps, progress))
    found = [step_spot().finding(15, message) for message in not_finite(runner, driver)]
    driver.restart()
    first, second, eager = runs
    for other, hazard, than in ((second, 24, "the same replays before"), (eager, 22, "no graphs")):
        difference = first_other(first, other)
        if difference is not None:
            return [step_spot().finding(hazard, f"{difference} than with {than}"), *found]
    return found


def _steps(driver: Driver, count: int, progress: Progress) -> None:
    for number in range(count):
        driver.step()
        progress(f"step {number}")
