# SPDX-License-Identifier: Apache-2.0
"""An `Explanation` as a picture: where a full arena's bytes go, and what flags would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.core.explain import Explanation


def plot(report: Explanation, file: Path) -> None:
    """Draw `report` into `file`, in the format its name says.

    Raises `VLLMValidationError` without matplotlib and for a format it does not write.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise VLLMValidationError("--plot needs matplotlib: pip install 'vllm[plot]'") from None
    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    uses, changes = figure.subplots(1, 2, width_ratios=(1, 1.2))
    figure.suptitle(f"{report.architecture}, {report.memory.arena_bytes / 1e9:,.4g} GB of state")
    _draw_uses(uses, report)
    _draw_changes(changes, report)
    try:
        figure.savefig(file, dpi=120)
    except ValueError as error:
        raise VLLMValidationError(f"--plot {file}: {error}") from None


def _draw_uses(axes: Any, report: Explanation) -> None:
    parts = [
        (group.kind, [use.state_bytes[i] for use in report.uses])
        for i, group in enumerate(report.groups)
    ]
    parts += [
        (waste.what, [use.wastes[i].num_bytes for use in report.uses])
        for i, waste in enumerate(report.uses[0].wastes)
    ]
    parts.append(("too little for one more", [use.left_bytes for use in report.uses]))
    labels = [f"{use.num_tokens:,}" for use in report.uses]
    bottom = [0.0] * len(labels)
    for what, sizes in parts:
        if any(sizes):
            heights = [size / 1e9 for size in sizes]
            axes.bar(labels, heights, bottom=bottom, label=what)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_title("A full arena")
    axes.set_xlabel("tokens per request")
    axes.set_ylabel("GB")
    axes.figure.legend(fontsize="small", loc="outside lower left", ncols=4)


def _draw_changes(axes: Any, report: Explanation) -> None:
    changes = [c for c in report.what_ifs if c.sequences and c.note != "as configured"]
    names = ["as configured", *(change.flag for change in changes)]
    offset = 0.8 / len(report.requests)
    for i, cost in enumerate(report.requests):
        ratios = [1.0, *(c.sequences[i] / max(cost.sequences, 1) for c in changes)]
        places = [row + i * offset for row in range(len(names))]
        axes.barh(places, ratios, height=offset, label=f"{cost.num_tokens:,} tokens")
    axes.set_yticks([row + 0.4 - offset / 2 for row in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_title("Requests at once, relative to this configuration")
    axes.legend(fontsize="small")
