# SPDX-License-Identifier: Apache-2.0
"""From the begins and ends of phases to seconds per phase that sum to the whole time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: the time that no phase covers
UNACCOUNTED = "unaccounted"


@dataclass(frozen=True)
class PhaseEvent:
    """A phase begins or ends; `time_s` is on the machine's monotonic clock."""

    name: str
    begins: bool
    time_s: float


def read_events(text: str) -> list[PhaseEvent]:
    """The file that `vllm.utils.startup_phases` writes."""
    return [PhaseEvent(**json.loads(line)) for line in text.splitlines()]


def ledger(events: Iterable[PhaseEvent], began_s: float, ended_s: float) -> dict[str, float]:
    """Seconds per phase, in the order the phases began, then `UNACCOUNTED`.

    Each instant counts once, for the phase that began last of those that run; so the values sum to
    `ended_s - began_s`. A phase that never ends lasts to the end.
    """
    seconds: dict[str, float] = {}
    unaccounted = 0.0
    running: list[str] = []
    previous = began_s
    for event in sorted(events, key=lambda e: e.time_s):
        elapsed = event.time_s - previous
        previous = event.time_s
        if running:
            seconds[running[-1]] += elapsed
        else:
            unaccounted += elapsed
        if event.begins:
            running.append(event.name)
            seconds.setdefault(event.name, 0.0)
        elif event.name in running:
            last = len(running) - 1 - running[::-1].index(event.name)
            del running[last]
    if running:
        seconds[running[-1]] += ended_s - previous
    else:
        unaccounted += ended_s - previous
    return {**seconds, UNACCOUNTED: unaccounted}


def table(runs: Sequence[dict[str, float]]) -> str:
    """One row per phase, one column per run, and the mean with its share of the total."""
    names = [n for n in dict.fromkeys(name for run in runs for name in run) if n != UNACCOUNTED]
    rows = [[run.get(name, 0.0) for run in runs] for name in (*names, UNACCOUNTED)]
    totals = [sum(run.values()) for run in runs]
    whole = sum(totals) / len(runs)
    width = max(map(len, [*names, UNACCOUNTED, "total (wall time)"]))
    columns = [f"run {i + 1}" for i in range(len(runs))] + ["mean", "share"]
    lines = [" " * width + "".join(f"{column:>10}" for column in columns)]
    for name, values in zip(
        [*names, UNACCOUNTED, "total (wall time)"], [*rows, totals], strict=True
    ):
        mean = sum(values) / len(values)
        cells = "".join(f"{value:>9.2f}s" for value in (*values, mean))
        lines.append(f"{name:<{width}}{cells}{100 * mean / whole:>9.1f}%")
    return "\n".join(lines)
