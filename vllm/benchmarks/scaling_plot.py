# SPDX-License-Identifier: Apache-2.0
"""`vllm bench scaling --plot`: how many times the first layout's speed each layout has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: measured and predicted, times the first layout's; nothing is predicted for unknown devices
Ratios = Sequence[tuple[float, float | None]]


def plot(path: str, title: str, layouts: Sequence[str], panels: Mapping[str, Ratios]) -> None:
    """A panel of bars for each entry of `panels`, which has a pair per layout."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 1.6 * len(layouts), 4), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, ratios) in zip(axes, panels.items(), strict=True):
        _bars(axis, layouts, ratios)
        axis.set(title=name, ylabel=f"times {layouts[0]}'s")
    figure.savefig(path, dpi=120)


def _bars(axis: Axes, layouts: Sequence[str], ratios: Ratios) -> None:
    series = {"measured": [measured for measured, _ in ratios]}
    predicted = [guess for _, guess in ratios if guess is not None]
    if predicted:
        series["predicted"] = predicted
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [place + i * width for place in range(len(layouts))]
        bars = axis.bar(places, values, width, label=label)
        axis.bar_label(bars, [f"{value:.2f}" for value in values], fontsize="small")
    middle = (len(series) - 1) * width / 2
    axis.set_xticks([place + middle for place in range(len(layouts))], layouts)
    axis.margins(y=0.15)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize="small", loc="lower left")
