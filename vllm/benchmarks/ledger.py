# SPDX-License-Identifier: Apache-2.0
"""The phases of several starts: read from the servers' files, shown as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence

from vllm.utils.phase_ledger import UNACCOUNTED, PhaseEvent


def read_events(text: str) -> list[PhaseEvent]:
    """The file that `vllm.utils.startup_phases` writes."""
    return [PhaseEvent(**json.loads(line)) for line in text.splitlines()]


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
