# SPDX-License-Identifier: Apache-2.0
"""Captures simulated on the CPU: planted hazards are found at their lines, and nothing else is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from tests.compilation.graph_safety.samples import replayed
from tests.compilation.graph_safety.test_planted import SAMPLES, expected
from vllm import decisions
from vllm.compilation.graph_break import graph_break
from vllm.compilation.graph_safety.hazards import HAZARDS
from vllm.compilation.graph_safety.report import as_json
from vllm.compilation.graph_safety.simulator.checked_run import CheckedRun
from vllm.compilation.graph_safety.simulator.functions import check_replays
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.exceptions import VLLMValidationError
from vllm.testing.graph_safety import assert_replays

PATH = SAMPLES / "replayed.py"


def lines_of(module: nn.Module) -> range:
    code = type(module).__name__
    lines = PATH.read_text().splitlines()
    first = next(i for i, line in enumerate(lines, 1) if line.startswith(f"class {code}("))
    ends = (i for i, line in enumerate(lines, 1) if i > first and line and line[0] not in " )")
    return range(first, next(ends))


@pytest.mark.parametrize("case", replayed.cases(), ids=lambda case: type(case.module).__name__)
def test_hazards_are_found_at_their_lines(case: replayed.Case) -> None:
    report = check_replays(case.module, case.steps, split=case.split, between=case.before)
    found = {(finding.line, finding.hazard) for finding in report.findings}
    assert {finding.path for finding in report.findings} == {str(PATH)}
    own = lines_of(case.module)
    assert found == {(line, hazard) for line, hazard in expected(PATH) if line in own}


def test_every_line_belongs_to_a_case() -> None:
    covered = {line for case in replayed.cases() for line in lines_of(case.module)}
    assert {line for line, _ in expected(PATH)} <= covered
    planted = {hazard for _, hazard in expected(PATH)}
    # Those of whole steps are planted in test_model_steps.py.
    assert planted | {21, 22, 28} == {h.number for h in HAZARDS.values() if h.replayed}


class Clean(nn.Module):
    """A cache of fixed size, written by slot; selection on the device; a break that fills `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(replayed.HIDDEN, replayed.HIDDEN)
        self.cache = torch.zeros(16, replayed.HIDDEN)
        self.seen: list[int] = []

    @graph_break
    def attend(self, x: Tensor, out: Tensor) -> None:
        self.seen.append(len(x))
        torch.matmul(x, self.cache.t() @ self.cache, out=out)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        hidden = self.proj(x)
        self.cache.index_copy_(0, position, hidden)
        out = torch.empty_like(hidden)
        self.attend(hidden, out)
        return torch.where((position % 2 == 0).unsqueeze(1), out, hidden)


@pytest.mark.parametrize("split", [False, True])
def test_what_is_clean(split: bool) -> None:
    module = Clean()
    report = assert_replays(module, replayed.steps(), split=split)
    assert "6 steps" in report.checks[0]
    # A break runs at the capture, and in a replay and an eager run of each step.
    assert len(module.seen) == (13 if split else 7)


def test_the_assertion_names_place_and_replacement() -> None:
    with pytest.raises(AssertionError, match=r"replayed\.py:\d+:\d+  #10 ") as error:
        assert_replays(replayed.Gathers(), replayed.steps())
    assert HAZARDS[10].replacement in str(error.value)


@pytest.mark.parametrize(
    ("module", "captured", "stale"),
    [(Clean(), True, 0), (replayed.CountedSteps(), True, 6), (replayed.ChangesDevice(), False, 0)],
)
def test_what_became_of_a_capture(module: nn.Module, captured: bool, stale: int) -> None:
    """It is part of the report as JSON. A capture counts as well, so that no step is like it."""
    (target,) = as_json([check_replays(module, replayed.steps())])["targets"]
    (found,) = target["captures"]
    assert (found["name"], found["captured"]) == (type(module).__name__, captured)
    assert (found["replays"], found["stale"]) == (6 * captured, stale)
    differs = (found["max_difference"] or 0.0) > 0
    assert differs == (stale > 0) and (found["max_difference"] is None) == (not captured)


def test_a_capture_leaves_no_trace_in_memory() -> None:
    total = torch.zeros(3)

    def add(x: Tensor) -> Tensor:
        return total.add_(x).clone()

    steps = [[torch.full((3,), float(i))] for i in range(4)]
    assert check_replays(add, steps).is_clean
    assert total.tolist() == [6.0, 6.0, 6.0]


def test_values_that_differ_without_another_launch() -> None:
    """Memory that the host changes while a step runs is what it was, or will be, in a replay."""
    counter = torch.zeros(1)
    shared = counter.numpy()

    def count(x: Tensor) -> Tensor:
        shared[0] += 1
        return x + counter

    report = check_replays(count, [[torch.zeros(2)]] * 2)
    (found,) = report.findings
    assert found.hazard == 7 and "differs from an eager run's" in found.message
    assert found.code == "x + counter"


def test_an_error_of_another_call_is_raised() -> None:
    def fail(x: Tensor) -> Tensor:
        torch.cpu.synchronize()
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        check_replays(fail, [[torch.zeros(2)]])


def test_where_a_missing_gpu_ends_the_check_the_report_says_so() -> None:
    report = check_replays(replayed.ChangesDevice(), replayed.steps())
    assert report.checks[0].startswith("simulated capture: ended where a call")


def test_a_profiler_stays() -> None:
    seen: list[str] = []

    def profiler(frame: FrameType, event: str, arg: object) -> None:
        seen.append(frame.f_code.co_name)

    def double(x: Tensor) -> Tensor:
        return x * 2

    sys.setprofile(profiler)
    try:
        check_replays(double, [[torch.zeros(2)]])
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert "double" in seen
    assert any(one.chosen == "not seen" for one in decisions.decisions())


@pytest.mark.parametrize(
    "steps", [[], [[torch.zeros(2)], [torch.zeros(3)]], [[torch.zeros(2)], []]]
)
def test_steps_that_cannot_be_replayed(steps: list[list[Tensor]]) -> None:
    with pytest.raises(VLLMValidationError):
        check_replays(torch.nn.Identity(), steps)


class Early(nn.Module):
    """Gives an op another number in every run, as its last argument."""

    def __init__(self, op: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.op = op
        self.runs = 0

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.runs += 1
        return self.op(x, self.runs == 1) + position[0]


@pytest.mark.parametrize("argument", ["overlap", "doubled"])
def test_whether_a_launch_begins_early_may_differ(argument: str) -> None:
    """Captures alone let it, and it changes no result; any other number is the capture's."""
    with torch.library._scoped_library("graph_safety_tests", "FRAGMENT") as library:
        library.define(f"early_{argument}(Tensor x, bool {argument}) -> Tensor")
        library.impl(f"early_{argument}", lambda x, early: x + 1, "CPU")
        op = getattr(torch.ops.graph_safety_tests, f"early_{argument}").default
        found = check_replays(Early(op), replayed.steps()).findings
    assert [finding.hazard for finding in found] == ([] if argument == "overlap" else [7])
    assert all("takes False from Python" in finding.message for finding in found)


@pytest.mark.parametrize("guarded", [True, False])
def test_what_padding_writes_by_chance_is_one_finding(guarded: bool) -> None:
    """Rows of padding that write to one place on a GPU: which of them is last is chance, and so is
    what is read there."""
    cache, out, recorder = torch.zeros(4, 8), torch.empty(4, 8), Recorder(set())

    def run() -> Tensor:
        cache.uniform_()
        return torch.mul(cache, 2, out=out)

    checked = CheckedRun(run, recorder, guarded={"the cache": cache} if guarded else {})
    for _ in range(3):
        checked.step(run)
    assert checked.stale_steps == 3
    assert [one.hazard for one in recorder.findings] == [21 if guarded else 7]
