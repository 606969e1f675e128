# SPDX-License-Identifier: Apache-2.0
"""Checks of one module or function: captured with one step's inputs, replayed with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm.compilation.graph_safety.report import Captured, Report, join_report
from vllm.compilation.graph_safety.simulator.checked_run import CheckedRun, SimulatedGraph
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.compilation.graph_safety.simulator.tensors import Handle
from vllm.exceptions import VLLMValidationError

CHECKS_RUN = (
    "simulated capture: {steps} steps on the CPU, each replayed with its own inputs and compared "
    "with an eager run, bit for bit"
)
CHECKS_ENDED = (
    "simulated capture: ended where a call that no captured step may make needs a GPU ({error})"
)
REPLAYED = "in a replayed step"

#: inputs by step
Steps = Sequence[Sequence[Tensor]]


def weights_of(*modules: nn.Module) -> set[int]:
    """Names of the memory of all parameters, which no step writes."""
    tensors = (parameter for module in modules for parameter in module.parameters())
    return {Handle.of(tensor.data).memory for tensor in tensors}


@torch.inference_mode()
def check_replays(
    function: Callable[..., Any],
    steps: Steps,
    *,
    split: bool = False,
    between: Callable[[int], None] = lambda step: None,
) -> Report:
    """Capture `function(*steps[0])`, then replay it for every step, the first included.

    `steps`: the inputs' values, of equal shapes and dtypes, on the CPU; they are copied into
    tensors that stay where they are, as a step's inputs do. `split`: at graph breaks. `between(i)`
    is called before step `i`: for what the engine does there, such as another step's work.

    Raises VLLMValidationError without steps, and for inputs that differ in shape or dtype.
    """
    same_kinds(steps)
    recorder = Recorder(weights_of(function) if isinstance(function, nn.Module) else set())
    checks = (CHECKS_RUN.format(steps=len(steps)),)
    captured = Captured(name_of(function), False)
    try:
        checked = replay_steps(function, steps, recorder, SimulatedGraph, split, between)
        captured = checked.result(name_of(function))
    except Exception as error:
        if not recorder.host_calls.ended_by(error):
            raise
        checks = (CHECKS_ENDED.format(error=error),)
    recorder.check_after()
    found = dict.fromkeys(recorder.findings, REPLAYED)
    return join_report(name_of(function), found, checks=checks, captures=(captured,))


def same_kinds(steps: Steps) -> None:
    """VLLMValidationError without steps, and for inputs that differ in shape or dtype."""
    if not steps:
        raise VLLMValidationError("give at least one step's inputs", "steps")
    kinds = [[(t.shape, t.dtype) for t in step] for step in steps]
    if kinds != [kinds[0]] * len(kinds):
        raise VLLMValidationError("all steps need inputs of the same shapes and dtypes", "steps")


def replay_steps(
    function: Callable[..., Any],
    steps: Steps,
    recorder: Recorder,
    graph: type[SimulatedGraph],
    split: bool,
    between: Callable[[int], None],
) -> CheckedRun:
    """Capture `function(*steps[0])` and take every step; what is found is the recorder's."""
    inputs = [tensor.clone() for tensor in steps[0]]
    checked = CheckedRun(lambda: function(*inputs), recorder, split=split, graph=graph)
    for number, step in enumerate(steps):
        between(number)
        for tensor, value in zip(inputs, step, strict=True):
            tensor.copy_(value)
        checked.step(lambda: function(*inputs))
    return checked


def name_of(function: Callable[..., Any]) -> str:
    """As reports name it."""
    return type(function).__qualname__ if isinstance(function, nn.Module) else function.__qualname__
