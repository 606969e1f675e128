# SPDX-License-Identifier: Apache-2.0
"""What the checks on a GPU are made of, without one: a stream that is a clock, a trace as torch
gives it, graphs that are recordings. The rest: tests/gpu/test_graph_check.py."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from vllm.compilation.graph_safety.device import allocations
from vllm.compilation.graph_safety.device.checks import replayed_steps
from vllm.compilation.graph_safety.device.sync_trap import waits_trapped
from vllm.compilation.graph_safety.simulator.checked_graphs import CheckedGraphs
from vllm.compilation.graph_safety.simulator.driver import Driver
from vllm.compilation.graph_safety.simulator.outcomes import not_finite
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.config import set_current_vllm_config
from vllm.config.current import with_own_layers
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import Replay


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


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    args = EngineArgs(
        model=str(tiny_model("qwen3_5")),
        load_format="dummy",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        speculative_config={
            "method": "draft_model",
            "model": str(tiny_model("llama")),
            "num_speculative_tokens": 1,
        },
    )
    config = with_own_layers(args.create_engine_config())
    with torch.no_grad(), set_current_vllm_config(config):
        runner = ModelRunner(config, torch.device("cpu"))
        runner.build_model()
        runner.load_weights()
        yield runner


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
    plan = GraphPlan([4], [], None, (1, runner.width))
    graphs = Drifting(runner, plan, Recorder(set()))
    graphs.exact = exact
    runner.graphs = graphs
    found = replayed_steps(runner, driver, 4, lambda name: None)
    assert [finding.hazard for finding in found] == ([] if hazard is None else [hazard])
    driver.restart()


@needs_cpu
def test_state_that_is_no_number(runner: ModelRunner) -> None:
    driver = Driver(runner)
    for _ in range(12):
        driver.step()
    assert not_finite(runner, driver) == []
    group = runner.groups[0]
    name, block = group.layer_names[0], driver.written_blocks(0)[0]
    view = runner.layers[name].kv_cache
    (view if isinstance(view, Tensor) else view[-1])[block].fill_(float("inf"))
    message = f"the state of {name} holds NaN or infinities after the steps"
    assert not_finite(runner, driver) == [message]
    driver.restart()
