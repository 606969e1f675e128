# SPDX-License-Identifier: Apache-2.0
"""`--plot`: latency distributions and the output rate as a picture (needs matplotlib)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np

from vllm.benchmarks.metrics import METRICS, output_rate
from vllm.benchmarks.outcome import Outcome
from vllm.exceptions import VLLMValidationError


def require_matplotlib() -> None:
    """Raise `VLLMValidationError` when the optional dependency is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise VLLMValidationError(
            "--plot needs matplotlib, which is not installed: pip install 'vllm[plot]'", "plot"
        )


def plot(path: str, outcomes: Sequence[Outcome], title: str) -> None:
    """Cumulative distributions of TTFT, ITL and E2EL, and output tokens per second over time."""
    from matplotlib.figure import Figure

    done = [o for o in outcomes if o.error is None]
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2).flat
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
    figure.savefig(path, dpi=120)
