# SPDX-License-Identifier: Apache-2.0
"""For tests of model and kernel authors: that a module or function can be part of a graph.

It is a pytest plugin, too: with `pytest_plugins = ["vllm.testing.graph_safety"]` in a `conftest.py`
the fixtures `assert_graph_safe` and `assert_steps_replay` are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import Tensor

from vllm.compilation.graph_safety.device.functions import check_graphs
from vllm.compilation.graph_safety.report import Report, as_table
from vllm.compilation.graph_safety.simulator.functions import check_replays
from vllm.compilation.graph_safety.targets import check_object

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

#: of a model: several of each kind
STEPS = 64


def assert_graph_safe(target: object) -> Report:
    """Check a module, a class of modules or a function by its source; see docs/graph-safety.md.

    Raises AssertionError that lists the hazards with file, line and replacement, and
    VLLMValidationError for what cannot be checked.
    """
    report = check_object(target)
    if not report.is_clean:
        raise AssertionError("not safe inside a graph:\n" + as_table([report]))
    return report


def assert_replays(
    function: Callable[..., Any],
    steps: Sequence[Sequence[Tensor]],
    *,
    split: bool = False,
    between: Callable[[int], None] = lambda step: None,
) -> Report:
    """Capture a module or function with the inputs of the first step, on the CPU or on the GPU
    where they lie; replay it for every step, and compare with eager runs bit for bit. See
    `check_replays` for the arguments, `check_graphs` for GPUs.

    Raises AssertionError that lists the hazards with file, line and replacement.
    """
    if any(tensor.is_cuda for step in steps[:1] for tensor in step):
        report = check_graphs(function, steps, split=split, between=between).as_report()
    else:
        report = check_replays(function, steps, split=split, between=between)
    if not report.is_clean:
        raise AssertionError("replays are not what eager runs are:\n" + as_table([report]))
    return report


def assert_steps_replay(model: EngineArgs | str | Path, steps: int = STEPS) -> Report:
    """Run `steps` whole steps of a model, its drafter included, with weights that are made up, as
    `vllm graph-check` does: on a CPU captured by recording, on GPUs in graphs. `model`: a folder or
    repository, or with other settings the arguments of an engine.

    Raises AssertionError that lists the hazards with file, line and replacement, and ValueError for
    what cannot be run.
    """
    from vllm.compilation.graph_safety.model_steps import check_model_steps
    from vllm.engine.arg_utils import EngineArgs

    args = model if isinstance(model, EngineArgs) else EngineArgs(model=str(model))
    report = check_model_steps(args, steps)
    if not report.is_clean:
        raise AssertionError("steps do not replay as they run:\n" + as_table([report]))
    return report


@pytest.fixture(name="assert_steps_replay")
def _assert_steps_replay() -> Callable[..., Report]:
    """`assert_steps_replay` of this module."""
    return assert_steps_replay


@pytest.fixture(name="assert_graph_safe")
def _assert_graph_safe() -> Callable[[object], Report]:
    """`assert_graph_safe` of this module."""
    return assert_graph_safe
