# SPDX-License-Identifier: Apache-2.0
"""`vllm bench scaling --plot`: measured and predicted ratios as bars (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Compared(Protocol):
    """A layout beside the first one."""

    @property
    def layout(self) -> str: ...
    @property
    def batch_ratio(self) -> float: ...
    @property
    def request_ratio(self) -> float: ...
    @property
    def predicted_batch_ratio(self) -> float | None: ...
    @property
    def predicted_request_ratio(self) -> float | None: ...


def plot(path: str, runs: Sequence[Compared], title: str) -> None:
    """Throughput of the batch to the left, speed of one request to the right, of each layout."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 1.6 * len(runs), 4), layout="constrained")
    figure.suptitle(title)
    batch, request = figure.subplots(1, 2)
    names = [run.layout for run in runs]
    _bars(batch, names, [r.batch_ratio for r in runs], [r.predicted_batch_ratio for r in runs])
    _bars(
        request, names, [r.request_ratio for r in runs], [r.predicted_request_ratio for r in runs]
    )
    batch.set(title="Tokens/s of the batch", ylabel=f"times {names[0]}'s")
    request.set(title="Tokens/s of one request")
    figure.savefig(path, dpi=120)


def _bars(
    axis: Axes, names: list[str], measured: list[float], predicted: list[float | None]
) -> None:
    series: list[tuple[str, list[Any]]] = [("measured", measured)]
    if None not in predicted:
        series.append(("predicted", predicted))
    width = 0.8 / len(series)
    for i, (label, ratios) in enumerate(series):
        places = [place + i * width for place in range(len(names))]
        bars = axis.bar(places, ratios, width, label=label)
        axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], fontsize="small")
    middle = (len(series) - 1) * width / 2
    axis.set_xticks([place + middle for place in range(len(names))], names)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize="small")
