# SPDX-License-Identifier: Apache-2.0
"""Steps on several ranks, each in the process of a worker: all are checked, what one of them finds
is named with it, and one that fails or dies ends the check."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from tests.compilation.graph_safety.own_children import OwnChildren
from tests.compilation.graph_safety.samples.planted_rank import LAYOUTS, PlantedRank
from vllm.compilation.graph_safety import ranks
from vllm.compilation.graph_safety.model_steps import check_model_steps
from vllm.compilation.graph_safety.ranks import RankFound, RanksReport, check_rank
from vllm.compilation.graph_safety.report import Captured, Report
from vllm.compilation.graph_safety.simulator.spots import here
from vllm.compilation.graph_safety.simulator.tensors import Handle
from vllm.compilation.graph_safety.simulator.trace import Launch, NotReplayable, Trace
from vllm.compilation.graph_safety.walker import Finding
from vllm.distributed.parallel_state import get_world_group
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import main
from vllm.platforms import current_platform
from vllm.v1.executor.station import WorkerDiedError
from vllm.v1.worker.worker import Worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forking"),
    pytest.mark.skipif(not current_platform.is_cpu(), reason="runs the CPU's kernels"),
]
#: a prefill, a decode, both, a decode
STEPS = 4
LLAMA = str(tiny_model("llama"))


def _check(model: str = LLAMA, steps: int = STEPS, **layout: Any) -> Report:
    children = OwnChildren()
    report = check_model_steps(EngineArgs(model=model, **layout), steps)
    assert children.are_gone()
    return report


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_every_rank_is_checked(family: str, layout: str) -> None:
    report = _check(str(tiny_model(family)), **LAYOUTS[layout])
    assert report.findings == () and report.left == ()
    (said,) = report.checks
    assert f"{STEPS} replays in {STEPS} decode" in said and "in place of" not in said
    assert said.count("simulated captures") == (1 if "each of 2 ranks" in said else 2)
    assert ("each stage alone" in said) == (layout == "pp2")
    by_rank = [one for one in report.captures if one.name.startswith("rank 1: ")]
    assert by_rank and len(report.captures) == 2 * len(by_rank)
    assert sum(one.replays for one in by_rank) == STEPS
    assert all(one.captured and not one.stale for one in report.captures)


def test_drafts_of_ranks() -> None:
    method = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    report = _check(tensor_parallel_size=2, speculative_config=method)
    assert report.findings == ()


def test_the_command_shows_how_far_the_ranks_are(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    check_model_steps(EngineArgs(model=LLAMA, tensor_parallel_size=2), STEPS, told.append)
    assert len(told) == 2 * STEPS, "with graphs and without, of one rank"
    assert main(["graph-check", LLAMA, "-tp", "2", "--steps", str(STEPS)]) == 0
    out = capsys.readouterr().out
    assert "no hazard" in out and "on each of 2 ranks: simulated captures" in out
    assert "in place of" not in out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hazard_of_one_rank_is_named_with_it(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    planted = PlantedRank(rank=1, hazard=22)
    monkeypatch.setattr(ranks, "check_rank", planted)
    report = _check(**LAYOUTS[layout])
    (found,) = report.findings
    assert (found.path, found.line, found.hazard) == planted.plant.place
    assert report.modes[found] == "in a replayed step on rank 1"


@pytest.mark.parametrize("hazard", [7, 21, 28])
def test_what_one_rank_finds_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch, hazard: int
) -> None:
    """It replays, looks for causes and compares otherwise than they do."""
    planted = PlantedRank(rank=0, hazard=hazard)
    monkeypatch.setattr(ranks, "check_rank", planted)
    report = _check(tensor_parallel_size=2)
    places = {(one.path, one.line, one.hazard): report.modes[one] for one in report.findings}
    assert places[planted.plant.place] == "in a replayed step on rank 0"
    # What is no number reaches the other's state; what is stale here is not the other's hazard.
    assert hazard == 28 or len(places) == 1


def _raising(worker: Worker, *args: Any) -> RankFound:
    if worker.rank == 1:
        worker.model_runner.initialize_kv_cache = None  # type: ignore[assignment]
    return check_rank(worker, *args)


def test_a_rank_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, though the other one waits for it."""
    monkeypatch.setattr(ranks, "check_rank", _raising)
    children, began = OwnChildren(), time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1: TypeError: 'NoneType' object is not callable"):
        _check(tensor_parallel_size=2)
    assert time.monotonic() - began < 60, "which waits twice as long at most"
    assert children.are_gone()


def _dying(worker: Worker, *args: Any) -> RankFound:
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return check_rank(worker, *args)


def test_a_rank_that_dies_ends_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "check_rank", _dying)
    assert main(["graph-check", LLAMA, "-tp", "2", "--steps", str(STEPS)]) == 1
    assert "the worker of rank 1 died (SIGKILL)" in capsys.readouterr().err
    with pytest.raises(WorkerDiedError):
        _check(tensor_parallel_size=2)


def test_what_ranks_share_is_said_once() -> None:
    one, other = (Finding("m.py", line, 1, 7, "counted", "m.f", "x * n") for line in (3, 9))
    result = Captured("decodes of 1", True, 2)
    found = RankFound((one,), "4 steps", (result,))
    both = RanksReport((found, replace(found, findings=(other, one))))
    assert both.modes == {
        one: "in a replayed step on each of 2 ranks",
        other: "in a replayed step on rank 1",
    }
    assert both.summary == "on each of 2 ranks: 4 steps"
    assert [r.name for r in both.results] == ["rank 0: decodes of 1", "rank 1: decodes of 1"]
    clean = RankFound((), "5 steps", ())
    three = RanksReport((found, clean, found), alone=True)
    assert three.modes == {one: "in a replayed step on ranks 0, 2"}
    assert three.summary.startswith("on ranks 0, 2: 4 steps; on rank 1: 5 steps; each stage alone")
    assert get_world_group().all_agree(False) is False, "one process agrees with itself"


def test_a_replay_that_ends_in_the_middle_takes_part_in_what_is_left() -> None:
    """With tensors of its own: those of the capture may be gone."""
    x = torch.ones(2)
    ran: list[tuple[str, list[float]]] = []

    def noted(name: str) -> Callable[[Tensor], None]:
        return lambda tensor: ran.append((name, tensor.tolist()))

    def fails(tensor: Tensor) -> None:
        raise NotReplayable(2, here(), "another shape")

    trace, args = Trace(0), ((Handle.of(x),), {})
    launches = [
        Launch(name, noted(name), args, (), here(), True, is_collective="sum" in name)
        for name in ("a", "sum", "b", "sum of b")
    ]
    launches[2].run = fails
    trace.segments += [launches, [replace(launches[1], run=noted("last sum"))]]
    with pytest.raises(NotReplayable):
        trace.replay(0)
    assert ran == [("a", [1, 1]), ("sum", [1, 1])]
    trace.give_up()
    assert ran[2:] == [("sum of b", [0, 0]), ("last sum", [0, 0])]
