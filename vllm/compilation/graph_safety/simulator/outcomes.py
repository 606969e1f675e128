# SPDX-License-Identifier: Apache-2.0
"""What a run of steps did, step by step, to compare it with another run of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.compilation.graph_safety.simulator.checked_run import same_bits
from vllm.compilation.graph_safety.simulator.driver import Driver
from vllm.compilation.graph_safety.simulator.spots import Spot
from vllm.v1.worker.model_runner import ModelRunner


@dataclass(frozen=True)
class Outcome:
    """After a step: the requests' newest tokens and drafts `[requests, width]`, and a sum of the
    words of each page of the state memory `[pages]`, which differs where a page does. On the host:
    what is kept takes no memory of the device."""

    tokens: Tensor
    state: Tensor


def run_steps(
    runner: ModelRunner, driver: Driver, steps: int, progress: Callable[[str], None]
) -> list[Outcome]:
    """Run steps; what each left."""
    outcomes = []
    pages = runner.arena.buffer.view(torch.int64).view(runner.arena.plan.num_pages, -1)
    # Weighted, so that words that change places are seen; odd, so that no change of a word is lost
    # where a product overflows.
    weights = torch.arange(1, 2 * pages.shape[1], 2, device=pages.device)
    products = torch.empty_like(pages)
    for number in range(steps):
        driver.step()
        progress(f"step {number}")
        state = torch.mul(pages, weights, out=products).sum(1)
        outcomes.append(Outcome(driver.newest_tokens().cpu(), state.cpu()))
    return outcomes


def first_other(run: list[Outcome], other: list[Outcome]) -> str | None:
    """The first step in which two runs differ, and in what; None where there is none."""
    for number, (a, b) in enumerate(zip(run, other, strict=True)):
        for what, x, y in (("tokens", a.tokens, b.tokens), ("state memory", a.state, b.state)):
            if not same_bits(x, y):
                return f"step {number} has other {what}"
    return None


def step_spot() -> Spot:
    """Where a runner launches a step's model, for what has no place of its own."""
    return Spot(ModelRunner._run_model.__code__, 0, ModelRunner.__module__)
