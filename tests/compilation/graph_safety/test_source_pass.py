# SPDX-License-Identifier: Apache-2.0
"""The pass over the source in a process beside the steps: its report and errors are those of a pass
in this process, and nothing of it is left running."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest
from tiny_models import tiny_model

from tests.compilation.graph_safety.own_children import OwnChildren
from vllm import decisions
from vllm.compilation.graph_safety import model_steps, source_pass
from vllm.compilation.graph_safety.report import Report
from vllm.compilation.graph_safety.simulator.models import StepsReport
from vllm.compilation.graph_safety.source_pass import _WHAT
from vllm.compilation.graph_safety.walker import Finding
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import main
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.slow

ARGS = EngineArgs(model=str(tiny_model("llama")))


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> OwnChildren:
    """Threads of pytest's plug-ins hold no lock that the new process needs."""
    monkeypatch.setattr(source_pass, "reason_not_to_fork", lambda: None)
    return OwnChildren()


def _passed(beside: bool) -> tuple[Report, int]:
    """Its report, and how many functions were told of."""
    told: list[str] = []
    with source_pass.source_pass(ARGS, told.append, beside=beside) as source:
        source.poll()
        report = source.report()
        assert source.report() == report
    return report, len(told)


def test_the_report_is_the_same_beside_the_steps(children: OwnChildren) -> None:
    before, (report, told) = _passed(False), _passed(True)
    assert (report, told) == before
    assert report.functions and told >= len(report.functions)
    assert children.are_gone()


def _raises(error: Exception) -> NoReturn:
    raise error


class Twofold(Exception):
    """Cannot be unpickled: it has one argument of two."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (VLLMValidationError("no such model", "model"), VLLMValidationError, "no such model"),
        (Twofold("a", "b"), RuntimeError, "Twofold: a: b"),
    ],
)
def test_errors_travel(
    children: OwnChildren,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(source_pass, "check_model", lambda *args: _raises(error))
    with pytest.raises(kind, match=message):
        with source_pass.source_pass(ARGS, lambda name: None, beside=True) as source:
            source.report()
    assert children.are_gone()


def test_a_process_that_dies_is_an_error(
    children: OwnChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        source_pass, "check_model", lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(RuntimeError, match=rf"process of the {_WHAT} died \(SIGKILL\)"):
        with source_pass.source_pass(ARGS, lambda name: None, beside=True) as source:
            source.report()
    assert children.are_gone()


def test_what_goes_wrong_beside_ends_the_pass(
    children: OwnChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would take for ever."""
    monkeypatch.setattr(source_pass, "check_model", lambda *args: signal.pause())
    with pytest.raises(KeyError, match="steps"):
        with source_pass.source_pass(ARGS, lambda name: None, beside=True):
            raise KeyError("steps")
    assert children.are_gone()


def test_a_process_that_cannot_be_forked_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_pass, "reason_not_to_fork", lambda: "it has threads")
    _passed(True)
    (made,) = (one for one in decisions.PROCESS.decisions() if one.what == _WHAT)
    assert (made.chosen, made.why) == ("before the steps", "it has threads")


def _steps(args: EngineArgs, steps: int, progress: object) -> Report:
    finding = Finding(str(Path(__file__)), 3, 1, 26, "handed on", "m.f", "self.last = x")
    found = StepsReport((finding,), 1, 1, {}, ())
    return model_steps.join_report(args.model, {finding: "in a step"}, checks=(found.summary,))


def test_findings_of_both_sides_are_in_one_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_steps, "check_model_steps", _steps)
    assert main(["graph-check", ARGS.model]) == 1
    out = capsys.readouterr().out
    assert "#26" in out and " functions walked" in out and ": 1 hazard;" in out


def test_errors_of_the_pass_are_the_commands(
    children: OwnChildren, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the steps found something."""
    monkeypatch.setattr(model_steps, "check_model_steps", _steps)
    monkeypatch.setattr(source_pass, "check_model", lambda *args: _raises(ValueError("too deep")))
    assert main(["graph-check", ARGS.model]) == 1
    assert "vllm graph-check: error: too deep" in capsys.readouterr().err
    assert children.are_gone()
