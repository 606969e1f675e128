# SPDX-License-Identifier: Apache-2.0
"""Checks of one module or function on a GPU: watched, then captured there and replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm.compilation.graph_safety.device.captured_graph import CapturedGraph, DeviceRecorder
from vllm.compilation.graph_safety.report import Captured, Report, join_report
from vllm.compilation.graph_safety.simulator.checked_run import filled_memory
from vllm.compilation.graph_safety.simulator.functions import (
    REPLAYED,
    Steps,
    name_of,
    replay_steps,
    same_kinds,
    weights_of,
)
from vllm.compilation.graph_safety.walker import Finding


@dataclass(frozen=True)
class GraphsReport:
    """What was found in `steps` steps of `target` on a GPU, and what became of its capture."""

    target: str
    findings: tuple[Finding, ...]
    steps: int
    result: Captured

    @property
    def captured(self) -> bool:
        return self.result.captured

    @property
    def stale(self) -> int:
        return self.result.stale

    @property
    def summary(self) -> str:
        if not self.captured:
            return f"on a GPU: {self.steps} eager steps, watched; they cannot be captured"
        return (
            f"on a GPU: captured, {self.steps} steps replayed with their own inputs and compared "
            f"with an eager run, bit for bit; {self.stale} differ"
        )

    def as_report(self) -> Report:
        """With the findings that nothing allows."""
        found = dict.fromkeys(self.findings, REPLAYED)
        return join_report(self.target, found, checks=(self.summary,), captures=(self.result,))


@torch.inference_mode()
def check_graphs(
    function: Callable[..., Any],
    steps: Steps,
    *,
    split: bool = False,
    between: Callable[[int], None] = lambda step: None,
) -> GraphsReport:
    """`simulator.functions.check_replays` on the GPU where the inputs lie, with a CUDA graph.

    First a deep copy of `function` runs every step while waits of torch are noted, without
    `between`; where one waits outside of breaks, nothing is captured. A function that is no module
    has no copy, and takes these steps itself.

    Raises VLLMValidationError without steps, and for inputs that differ in shape or dtype.
    """
    same_kinds(steps)
    device = steps[0][0].device
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        watched = _watch(copy.deepcopy(function), steps, split)
        findings = dict(watched.findings)
        result = Captured(name_of(function), False)
        if not watched.ends_capture:
            recorder = _recorder(function)
            checked = replay_steps(function, steps, recorder, CapturedGraph, split, between)
            result = checked.result(name_of(function))
            recorder.check_after()
            findings |= recorder.findings
        torch.cuda.synchronize()
    return GraphsReport(name_of(function), tuple(findings), len(steps), result)


def _recorder(function: Callable[..., Any]) -> DeviceRecorder:
    return DeviceRecorder(weights_of(function) if isinstance(function, nn.Module) else set())


def _watch(function: Callable[..., Any], steps: Steps, split: bool) -> DeviceRecorder:
    """Run every step once, eagerly, to its end or to a call that a GPU refuses."""
    recorder = _recorder(function)
    for step in steps:
        try:
            with filled_memory(), recorder.recording(undone=False) as trace:
                recorder.begin_segment()
                if split:
                    with recorder.breaks():
                        function(*step)
                else:
                    function(*step)
        except Exception as error:
            if not recorder.refused(error) and not recorder.host_calls.ended_by(error):
                raise
            recorder.ends_capture = True
            break
        trace.owned.clear()
    return recorder
