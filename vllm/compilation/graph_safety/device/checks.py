# SPDX-License-Identifier: Apache-2.0
"""A model's steps on GPUs: captured on a stream of their own, watched, replayed and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm.compilation.graph_safety.device.allocations import allocations_noted, growth
from vllm.compilation.graph_safety.device.captured_graph import (
    CapturedGraph,
    DeviceRecorder,
)
from vllm.compilation.graph_safety.device.eager_graphs import EagerGraphs
from vllm.compilation.graph_safety.device.own_sizes import capture_own_sizes
from vllm.compilation.graph_safety.device.run import DeviceRun, empty_graphs_raise, what_ran
from vllm.compilation.graph_safety.device.sync_trap import (
    BusyStream,
    CurrentStream,
    torch_waits_raise,
    torch_waits_warn,
    waits_trapped,
)
from vllm.compilation.graph_safety.report import Captured
from vllm.compilation.graph_safety.simulator.checked_run import SimulatedGraph
from vllm.compilation.graph_safety.simulator.driver import Driver
from vllm.compilation.graph_safety.simulator.functions import REPLAYED, weights_of
from vllm.compilation.graph_safety.simulator.models import check_runner
from vllm.compilation.graph_safety.simulator.not_finite import layers_not_finite, why_not_finite
from vllm.compilation.graph_safety.simulator.outcomes import (
    Outcome,
    first_other,
    run_steps,
    step_spot,
)
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.compilation.graph_safety.simulator.spots import Spot, here, spot_of_error
from vllm.compilation.graph_safety.walker import Finding
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import StepGraphs
from vllm.v1.worker.warm_up import profile_peak_bytes, warm_up
from vllm.v1.worker.worker import Worker

Progress = Callable[[str], None]
#: steps before anything is watched, and steps that are
_WARM, _WATCHED = 40, 64
#: steps on a stream that is kept busy, half a second each
_TRAPPED = 8
#: steps that are replayed at least
LONG_RUN = 512
#: steps that are compared launch by launch: enough for each kind of step
LOCATED = 24


@dataclass(frozen=True)
class DevicesReport:
    """What was found on `devices` GPUs, with `steps` replayed on each that got so far; `done`: what
    ran, in words; `results`: what became of the captures whose launches were compared."""

    findings: tuple[Finding, ...]
    devices: int
    steps: int
    done: tuple[str, ...]
    results: tuple[Captured, ...] = ()

    @property
    def modes(self) -> dict[Finding, str]:
        """Where each finding is."""
        return dict.fromkeys(self.findings, REPLAYED)

    @property
    def summary(self) -> str:
        return f"on {self.devices} GPU(s): {'; '.join(self.done)}"


def check_devices(
    vllm_config: VllmConfig,
    steps: int,
    progress: Progress = lambda name: None,
    own_sizes: VllmConfig | None = None,
) -> DevicesReport:
    """Check every visible GPU in turn, with `LONG_RUN` steps at least, of `vllm_config`; then
    capture every graph of `own_sizes`, the same model with the sizes that it is to be served with.
    `load_format` "dummy" makes weights up."""
    steps = max(steps, LONG_RUN)
    runs: dict[torch.device, DeviceRun] = {}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        runs[device] = run = DeviceRun()
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            with built_runner(vllm_config, device) as runner:
                check_built(runner, run, steps, progress)
            if own_sizes is not None and not run.findings:
                check_sizes(own_sizes, device, run)
    torch.cuda.set_device(0)
    found = dict.fromkeys(finding for run in runs.values() for finding in run.findings)
    results = (
        replace(one, name=f"{device}: {one.name}")
        for device, run in runs.items()
        for one in run.results
    )
    return DevicesReport(tuple(found), len(runs), steps, what_ran(runs), tuple(results))


@contextmanager
def built_runner(vllm_config: VllmConfig, device: torch.device) -> Iterator[ModelRunner]:
    """The runner of a worker of the configuration's rank with its model, whose kernels were
    compiled on all cores; it is dropped after the block, however that ends."""
    worker = Worker(vllm_config, device.index, vllm_config.parallel_config.rank)
    with torch.no_grad():
        worker.init_device()
        try:
            worker.load_model()
            worker.await_kernels()
            with worker.at_work():
                yield worker.model_runner
        finally:
            worker.shutdown()


def check_sizes(vllm_config: VllmConfig, device: torch.device, run: DeviceRun) -> None:
    """Capture every graph of a configuration on a GPU, on the current stream."""
    with built_runner(vllm_config, device) as runner:
        capture_own_sizes(runner, run, _memory_for_state(runner))


def check_built(runner: ModelRunner, run: DeviceRun, steps: int, progress: Progress) -> None:
    """Check a runner on a GPU whose model has its weights; its memory is made here. Of several
    ranks each does this at the same time: what one of them finds ends the check of all."""
    driver, device, ranks = Driver(runner), runner.device, get_world_group()
    failure: RuntimeError | UserWarning | None = None
    try:
        with empty_graphs_raise():
            warm_up(runner)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, UserWarning) as error:
        failure = error
    if not ranks.all_agree(failure is None):
        if failure is not None:
            run.findings.append(_failed_capture(runner, driver, device, failure))
        else:
            # What another rank looks into takes a step of all.
            runner.graphs = StepGraphs()
            driver.step()
        run.done.append("a capture failed, no step was watched or replayed")
        return
    run.done.append(f"{runner.graphs.num_captured} graphs captured on a stream of their own")
    run.findings += watched_steps(runner, driver, device, CurrentStream(), progress)
    run.done.append(
        f"{_WATCHED} decode, verify and mixed steps with waits of torch as errors and the "
        f"allocator watched, {_TRAPPED} on a busy stream"
    )
    if not ranks.all_agree(not run.findings):
        run.done.append("none were replayed, for what was found before")
        return
    compare_steps(
        runner, run, driver, steps, progress, partial(torch.cuda.memory_allocated, device)
    )


def compare_steps(
    runner: ModelRunner,
    run: DeviceRun,
    driver: Driver,
    steps: int,
    progress: Progress,
    in_use: Callable[[], int],
    *,
    located: int = LOCATED,
    recorder_of: type[Recorder] = DeviceRecorder,
    graph: type[SimulatedGraph] = CapturedGraph,
) -> None:
    """Replay a runner's graphs for `steps` steps, twice, and compare; then, in `located` steps,
    each launch of a capture with an eager run's, which tells the line. `in_use`: bytes of the
    device. What records and captures is a GPU's, or the simulator's."""
    whole = replayed_steps(runner, driver, steps, progress, in_use)
    run.done.append(
        f"{steps} replayed twice, with bytes in use compared, and compared with the same launches "
        "without graphs, bit for bit"
    )
    runner.drop_graphs()
    report = check_runner(
        runner, located, progress, recorder_of=recorder_of, graph=graph, without_graphs=False
    )
    run.done.append(
        f"{sum(report.replays.values())} replays of {report.captures} graphs compared launch by "
        f"launch, with padding that may not write to state and {len(report.addresses)} addresses "
        "that may not change"
    )
    run.results += report.results
    # With a line, what a whole step shows is that hazard's, also on a rank that shares layers with
    # the one that has it. A race has none, but rows of padding that write to one place (21) race.
    items, group = {finding.hazard for finding in report.findings}, get_tp_group()
    has_line, padding_races = not group.all_agree(not items), not group.all_agree(21 not in items)
    rest = [one for one in whole if not has_line or (one.hazard == 24 and not padding_races)]
    run.findings += [*report.findings, *rest]


def _memory_for_state(runner: ModelRunner) -> int:
    """Bytes that an engine on this GPU would have for state."""
    share = runner.vllm_config.cache_config.gpu_memory_utilization
    total = current_platform.total_memory_bytes(runner.device.index or 0)
    return int(total * share) - profile_peak_bytes(runner)


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
    waited: list[Spot] = []
    # Other ranks would wait for what a step that ends in the middle leaves out.
    alone = get_world_group().world_size == 1
    strict = (
        torch_waits_raise if alone else partial(torch_waits_warn, lambda: waited.append(here()))
    )
    as_stage = nullcontext if runner.stage is None else runner.stage.alone

    def strictly(output: SchedulerOutput) -> None:
        with strict(), as_stage():
            runner.execute_model(output)
        torch.cuda.synchronize(device)

    def trapped(output: SchedulerOutput) -> None:
        with waits_trapped(stream) as waits, as_stage():
            runner.execute_model(output)
        torch.cuda.synchronize(device)
        if waits.spot is not None:
            found.append(waits.spot.finding(14, "the host waits here for a busy stream"))

    try:
        driver.launch = strictly
        with allocations_noted(device) as allocated:
            _steps(driver, _WATCHED, progress)
        found += allocated
        if not get_world_group().all_agree(not waited):
            found += [spot.finding(1, "an op of torch waits for the device") for spot in waited[:1]]
            return found
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
    runner: ModelRunner,
    driver: Driver,
    steps: int,
    progress: Progress,
    in_use: Callable[[], int],
) -> list[Finding]:
    """Steps with graphs, twice, and without; every step must end with the same bits, and what is in
    use (bytes) not grow with the replays."""
    runs: list[list[Outcome]] = []
    levels: list[int] = []
    captured = runner.graphs

    def watched(name: str) -> None:
        levels.append(in_use())
        progress(name)

    driver.restart()
    runs.append(run_steps(runner, driver, steps, watched))
    overflown = layers_not_finite(runner, driver)
    driver.restart()
    runs.append(run_steps(runner, driver, steps, progress))
    runner.graphs = EagerGraphs(runner, captured)
    driver.restart()
    runs.append(run_steps(runner, driver, steps, progress))
    driver.restart()
    first, second, eager = runs
    found = []
    for other, hazard, than in ((second, 24, "the same replays before"), (eager, 22, "no graphs")):
        difference = first_other(first, other)
        if difference is not None:
            found.append(step_spot().finding(hazard, f"{difference} than with {than}"))
            break
    if (grown := growth(levels)) is not None:
        found.append(step_spot().finding(9, grown))
    causes = why_not_finite(runner, driver, overflown, steps)
    return found + [one.spot.finding(one.hazard, one.message) for one in causes]


def _steps(driver: Driver, count: int, progress: Progress) -> None:
    for number in range(count):
        driver.step()
        progress(f"step {number}")
