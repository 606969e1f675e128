# SPDX-License-Identifier: Apache-2.0
"""What a check on one GPU has found and done so far."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from vllm.compilation.graph_safety.report import Captured
from vllm.compilation.graph_safety.walker import Finding


@dataclass
class DeviceRun:
    """What was found on one GPU, what ran there, in words, and what became of the captures whose
    launches were compared."""

    findings: list[Finding] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    results: list[Captured] = field(default_factory=list)


def what_ran(runs: Mapping[torch.device, DeviceRun]) -> tuple[str, ...]:
    """In words: once if it is the same on every GPU."""
    done = [tuple(run.done) for run in runs.values()]
    if len(set(done)) == 1:
        return done[0]
    return tuple(f"{device}: {', '.join(run.done)}" for device, run in runs.items())


@contextmanager
def empty_graphs_raise() -> Iterator[None]:
    """Inside the block a graph that nothing was captured into is an error: work went to another
    stream or device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA Graph is empty.*")
        yield
