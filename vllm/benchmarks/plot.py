# SPDX-License-Identifier: Apache-2.0
"""`--plot`: latency distributions, the output rate and how often drafts were right as a picture
(needs matplotlib)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm.benchmarks.metrics import METRICS, output_rate
from vllm.benchmarks.outcome import Outcome
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    """Raise `VLLMValidationError` when the optional dependency is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise VLLMValidationError(
            "--plot needs matplotlib, which is not installed: pip install 'vllm[plot]'", "plot"
        )


def plot(
    path: str,
    outcomes: Sequence[Outcome],
    title: str,
    acceptance: Sequence[float] | None = None,
) -> None:
    """Cumulative distributions of TTFT, ITL and E2EL, and output tokens per second over time; from
    a server that drafted also `acceptance`, the share of drafts accepted by position."""
    from matplotlib.figure import Figure

    done = [o for o in outcomes if o.error is None]
    figure = Figure(figsize=(10, 10.5 if acceptance else 7), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(3 if acceptance else 2, 2)
    axes = [figure.add_subplot(grid[place // 2, place % 2]) for place in range(4)]
    series = {
        "ttft": [o.ttft for o in done],
        "itl": [gap for o in done for gap in o.itl],
        "e2el": [o.latency for o in done],
    }
    for axis, (name, values) in zip(axes, series.items(), strict=False):
        ms = np.sort(np.asarray(values)) * 1000
        axis.step(ms, np.arange(1, len(ms) + 1) / max(1, len(ms)), where="post")
        axis.set(title=METRICS[name], xlabel="ms", ylabel="share of values", ylim=(0, 1.02))
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
    last = axes[3]
    rate = output_rate(done)
    last.bar(np.arange(len(rate)), rate, width=1.0, align="edge")
    last.set(title="Output", xlabel="s", ylabel="tokens in that second")
    last.grid(alpha=0.3)
    if acceptance:
        plot_acceptance(figure.add_subplot(grid[2, :]), acceptance)
    figure.savefig(path, dpi=120)


def plot_acceptance(axis: Axes, rates: Sequence[float]) -> None:
    """`rates`: shares of all drafts whose token at each position was accepted."""
    bars = axis.bar(np.arange(1, len(rates) + 1), rates)
    axis.bar_label(bars, [f"{rate:.2f}" for rate in rates])
    length = 1 + sum(rates)
    axis.set(title=f"Accepted drafts: {length:.2f} tokens per step", ylim=(0, 1.1))
    axis.set(xlabel="position in the draft", ylabel="share accepted")
    axis.set_xticks(np.arange(1, len(rates) + 1))
    axis.grid(alpha=0.3, axis="y")
