# SPDX-License-Identifier: Apache-2.0
"""What the checks on a GPU are made of, without one: a stream that is a clock, a trace as torch
gives it, graphs that are recordings. The rest: tests/gpu/test_graph_check.py."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from tests.compilation.graph_safety.samples.replayed_steps import PLANTS, Plant
from vllm.compilation.graph_safety.device import allocations, checks
from vllm.compilation.graph_safety.device.checks import DevicesReport, compare_steps, replayed_steps
from vllm.compilation.graph_safety.device.own_sizes import capture_own_sizes
from vllm.compilation.graph_safety.device.run import DeviceRun, what_ran
from vllm.compilation.graph_safety.device.sync_trap import waits_trapped
from vllm.compilation.graph_safety.model_steps import gpu_errors_explained
from vllm.compilation.graph_safety.simulator.checked_graphs import CheckedGraphs, CheckedGraphSet
from vllm.compilation.graph_safety.simulator.checked_run import SimulatedGraph
from vllm.compilation.graph_safety.simulator.driver import Driver
from vllm.compilation.graph_safety.simulator.models import check_runner
from vllm.compilation.graph_safety.simulator.not_finite import layers_not_finite
from vllm.compilation.graph_safety.simulator.outcomes import step_spot
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.config import set_current_vllm_config
from vllm.config.current import with_own_layers
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.executor.station import WorkerDiedError
from vllm.v1.worker.graph_plan import GraphPlan, most_sequences
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import Replay, StepGraphs


class Stream:
    """Busy until somebody has waited for it, which takes a fifth of a second."""

    def occupy(self) -> None:
        self._is_busy = True

    def is_busy(self) -> bool:
        return self._is_busy

    def wait(self) -> None:
        for _ in range(40):
            time.sleep(0.005)
        self._is_busy = False


def test_a_wait_is_found_where_it_is() -> None:
    stream = Stream()
    with waits_trapped(stream) as waits:
        stream.wait()
    assert waits.spot is not None
    lines, first = inspect.getsourcelines(Stream.wait)
    assert waits.spot.path == __file__
    assert first <= waits.spot.finding(14, "").line < first + len(lines)


def test_a_step_that_only_launches_does_not_wait() -> None:
    with waits_trapped(Stream()) as waits:
        torch.zeros(3).add_(1)
    assert waits.spot is None


def _event(action: str, path: str, line: int) -> dict[str, Any]:
    frames = [
        {"filename": torch.__file__, "line": 7, "name": "empty"},
        {"filename": path, "line": line, "name": "forward"},
    ]
    return {"action": action, "size": 2**21, "addr": 0, "frames": frames}


def test_memory_taken_from_the_driver() -> None:
    trace = [
        _event("alloc", "model.py", 3),
        _event("segment_alloc", "model.py", 5),
        _event("segment_alloc", "model.py", 5),
        _event("segment_map", "other.py", 9),
        {"action": "segment_alloc", "size": 1, "addr": 0, "frames": []},
    ]
    found = allocations.taken_segments(trace)
    places = [(f.path, f.line, f.function, f.hazard) for f in found]
    assert places[:2] == [("model.py", 5, "forward", 6), ("other.py", 9, "forward", 6)]
    assert len(found) == 3 and found[2].path == allocations.__file__


needs_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="runs the CPU's kernels")


PLAIN = EngineArgs(
    model=str(tiny_model("llama")),
    load_format="dummy",
    dtype="float32",
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)


@contextmanager
def _runner_of(args: EngineArgs) -> Iterator[ModelRunner]:
    config = with_own_layers(args.create_engine_config())
    with torch.no_grad(), set_current_vllm_config(config):
        runner = ModelRunner(config, torch.device("cpu"))
        runner.build_model()
        runner.load_weights()
        yield runner


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    drafter = {
        "method": "draft_model",
        "model": str(tiny_model("llama")),
        "num_speculative_tokens": 1,
    }
    with _runner_of(
        replace(PLAIN, model=str(tiny_model("qwen3_5")), speculative_config=drafter)
    ) as runner:
        yield runner


def nothing_in_use() -> int:
    return 0


def quiet(name: str) -> None:
    pass


class Replayed(CheckedGraphs):
    """Steps take what a replay gives, right or not."""

    def replay(self, chosen: Replay) -> Tensor:
        graphs = (self._decodes if chosen.whole else self._pieces)[chosen.width]
        assert isinstance(graphs, CheckedGraphSet)
        result: Tensor = graphs.captured(chosen.size).replay()
        return result


class Drifting(CheckedGraphs):
    """The logits of every replay after `exact` ones are turned around."""

    exact = 0

    def replay(self, chosen: Replay) -> Tensor:
        self.exact -= 1
        return super().replay(chosen) * (1 if self.exact >= 0 else -1)


@needs_cpu
@pytest.mark.parametrize(("exact", "hazard"), [(99, None), (0, 22), (3, 24)])
def test_runs_are_compared(runner: ModelRunner, exact: int, hazard: int | None) -> None:
    """With the same launches eagerly, and with themselves: three replays are the first run's."""
    driver = Driver(runner)
    plan = GraphPlan([4], [], None, runner.widths)
    graphs = Drifting(runner, plan, Recorder(set()))
    graphs.exact = exact
    runner.graphs = graphs
    found = replayed_steps(runner, driver, 4, quiet, nothing_in_use)
    assert [finding.hazard for finding in found] == ([] if hazard is None else [hazard])
    driver.restart()


@pytest.mark.parametrize(
    ("levels", "grows"),
    [
        ([5, 9, 6, 8] * 4, False),
        ([5, 9, 6, 8] * 2 + [25, 29, 26, 28] * 2, False),  # made once, in the middle
        ([5, 9, 6, 8] + [25, 29, 26, 28] * 3, False),
        ([5, 9, 6, 8] * 3 + [25, 29, 26, 28], False),
        ([4 * i + (5, 9, 6, 8)[i % 4] for i in range(16)], True),
        ([8, 7, 6, 5, 4, 3, 2, 1], False),
        ([1, 2, 3], False),
    ],
)
def test_growth(levels: list[int], grows: bool) -> None:
    assert (allocations.growth(levels) is not None) == grows


@pytest.fixture(scope="module")
def plain_runner() -> Iterator[ModelRunner]:
    with _runner_of(PLAIN) as runner:
        yield runner


@needs_cpu
def test_what_is_in_use_may_not_grow(plain_runner: ModelRunner) -> None:
    runner = plain_runner
    runner.graphs = StepGraphs()
    found = replayed_steps(runner, Driver(runner), 8, quiet, count(4096, 512).__next__)
    assert [(f.hazard, f.message) for f in found] == [
        (9, "bytes in use grow with the steps, from 4096 to 7680 in 8")
    ]


@needs_cpu
@pytest.mark.parametrize("plant", [*PLANTS, None], ids=lambda p: p and p.apply.__name__)
def test_planted_hazards_have_their_lines(plain_runner: ModelRunner, plant: Plant | None) -> None:
    """What the command does once nothing waits: a whole step that is stale is told by its line."""
    runner, driver, run = plain_runner, Driver(plain_runner), DeviceRun()
    with nullcontext(quiet) if plant is None else plant.apply(runner) as between:
        runner.graphs = Replayed(runner, GraphPlan([4], [64]), Recorder(set()))
        compare_steps(
            runner,
            run,
            driver,
            4,
            between,
            nothing_in_use,
            located=3,
            recorder_of=Recorder,
            graph=SimulatedGraph,
        )
    found = {(finding.path, finding.line, finding.hazard) for finding in run.findings}
    assert found == (set() if plant is None else {plant.place})
    assert run.done[0].startswith("4 replayed twice") and "launch by launch" in run.done[1]


@needs_cpu
def test_stale_steps_without_a_line_are_told(
    plain_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is a race beside what has one."""
    runner, driver = plain_runner, Driver(plain_runner)
    runner.graphs = StepGraphs()
    rough = [step_spot().finding(hazard, "differs") for hazard in (22, 24)]
    monkeypatch.setattr(checks, "replayed_steps", lambda *args: rough)
    compare = partial(
        compare_steps, located=2, recorder_of=Recorder, graph=SimulatedGraph, in_use=nothing_in_use
    )
    run = DeviceRun()
    compare(runner, run, driver, 2, quiet)
    assert run.findings == rough
    (plant,) = (plant for plant in PLANTS if plant.hazard == 7)
    with plant.apply(runner) as between:
        run = DeviceRun()
        compare(runner, run, Driver(runner), 2, between)
    assert [finding.hazard for finding in run.findings] == [7, 24]


# ---- the sizes to serve with ---------------------------------------------------------------------


def _simulated(runner: ModelRunner, sizes: list[int], pieces: list[int]) -> None:
    runner.graphs = CheckedGraphs(runner, GraphPlan(sizes, pieces), Recorder(set()))


@needs_cpu
def test_every_size_is_captured(plain_runner: ModelRunner) -> None:
    """In memory for the largest, which is then compared with the buffers."""
    runner, run = plain_runner, DeviceRun()
    compilation = runner.vllm_config.compilation_config
    assert compilation.decode_capture_sizes == [], "a CPU captures nothing"
    compilation.decode_capture_sizes = [1, 2, 4]
    try:
        capture_own_sizes(runner, run, 2**30, partial(_simulated, sizes=[1, 2, 4], pieces=[8, 64]))
        (said,) = run.done
        assert said == (
            "at the sizes to serve with 5 graphs captured: decodes of up to 4 requests, pieces of "
            "up to 64 tokens"
        )
        assert run.findings == []
        assert most_sequences(runner.kv_cache_config, 9) == 4
        with pytest.raises(ValueError, match=r"0\.00 GiB are left for state"):
            capture_own_sizes(runner, run, 0)
    finally:
        compilation.decode_capture_sizes = []


@needs_cpu
def test_sizes_that_do_not_fit_or_fail(plain_runner: ModelRunner) -> None:
    def narrow(runner: ModelRunner) -> None:
        _simulated(runner, [2], [8])
        runner.block_tables.groups[0].slots = torch.zeros(4, dtype=torch.int64)

    def fails(runner: ModelRunner) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    run = DeviceRun()
    capture_own_sizes(plain_runner, run, 2**30, narrow)
    assert {finding.hazard for finding in run.findings} == {16}
    run = DeviceRun()
    capture_own_sizes(plain_runner, run, 2**30, fails)
    (found,) = run.findings
    assert (found.path, found.hazard) == (__file__, 13)
    assert "to serve with: operation not permitted" in found.message
    assert run.done == ["a capture at the sizes to serve with failed"]


def test_the_report_says_what_ran() -> None:
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    whole, ended = DeviceRun(done=["captured", "replayed"]), DeviceRun(done=["a capture failed"])
    assert what_ran({one: whole, other: whole}) == ("captured", "replayed")
    differing = what_ran({one: whole, other: ended})
    assert differing == ("cuda:0: captured, replayed", "cuda:1: a capture failed")
    assert DevicesReport((), 2, 512, differing).summary == (
        "on 2 GPU(s): cuda:0: captured, replayed; cuda:1: a capture failed"
    )


@needs_cpu
def test_state_that_is_no_number(runner: ModelRunner) -> None:
    driver = Driver(runner)
    for _ in range(12):
        driver.step()
    assert layers_not_finite(runner, driver) == []
    group = runner.groups[0]
    name, block = group.layer_names[0], driver.written_blocks(0)[0]
    view = runner.layers[name].kv_cache
    (view if isinstance(view, Tensor) else view[-1])[block].fill_(float("inf"))
    assert layers_not_finite(runner, driver) == [name]
    driver.restart()


@needs_cpu
def test_a_runner_has_its_model_inside_the_block_only() -> None:
    """One after the other, also where a check raises."""
    config = PLAIN.create_engine_config()
    device = torch.device("cpu", 0)
    with checks.built_runner(config, device) as first:
        assert check_runner(first, 2).findings == ()
    with pytest.raises(KeyError), checks.built_runner(config, device) as second:
        assert check_runner(second, 2).findings == ()
        raise KeyError
    assert "model" not in vars(first) and "model" not in vars(second)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access"),
        WorkerDiedError("rank 1 died"),
    ],
    ids=["of this process", "of a rank"],
)
def test_what_ends_a_gpus_process_says_who_names_the_line(error: RuntimeError) -> None:
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES= vllm graph-check") as raised:
        with gpu_errors_explained():
            raise error
    assert str(error) in str(raised.value) and raised.value.__cause__ is error
    with pytest.raises(torch.cuda.OutOfMemoryError), gpu_errors_explained():
        raise torch.cuda.OutOfMemoryError("too small")


def test_the_runner_of_the_sizes_to_serve_with_is_of_the_same_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it was the first one's, both ranks waited for ever for messages of the second."""
    made: list[int] = []

    class Noted(checks.Worker):
        def init_device(self) -> None:
            made.append(self.rank)
            raise InterruptedError

    monkeypatch.setattr(checks, "Worker", Noted)
    config = EngineArgs(model=str(tiny_model("llama"))).create_engine_config()
    config.parallel_config.rank = 1
    with pytest.raises(InterruptedError):
        checks.check_sizes(config, torch.device("cuda", 1), DeviceRun())
    assert made == [1]
