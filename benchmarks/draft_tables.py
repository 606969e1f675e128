# SPDX-License-Identifier: Apache-2.0
"""The table of what drafts gain at a given acceptance (`benchmarks/forced_acceptance.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measured_tables import load

#: how the table names what drafts
NAMES = {
    "verify": "nothing that costs",
    "eagle3": "`eagle3`, one layer, 32,000 tokens",
    "dflash": "`dflash`, five layers, one block",
}
HEAD = (
    "drafts by",
    "requests",
    "step without",
    "step with drafts",
    "of a step without",
    "tokens per step, mean",
    "ratio",
    "ratio as seen",
    "predicted",
)


def gains() -> str:
    """What was measured on one H200."""
    return rows(load("h200_drafts.json")["rows"])


def rows(data: Sequence[Mapping[str, Any]]) -> str:
    """A line per drafter and number of requests; who drafts is named once."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    before = None
    for row in data:
        kind = row["drafter"].partition(":")[0]
        name = f"{NAMES[kind]}, {row['drafts']}" if row["drafter"] != before else ""
        before = row["drafter"]
        with_drafts = f"{row['step_us'] / 1e3:.2f} ms"
        if row["tokens_per_step"] < 1.1:
            with_drafts += ", nothing drafted"
        mean = row["ratio_at_mean"] * row["step_by_plain"]
        without = f"{row['plain_us'] / 1e3:.2f} ms ± {50 * row['plain_spread']:.1f} %"
        cells = [name, str(row["requests"]), without, with_drafts, f"{row['step_by_plain']:.3f}"]
        cells += [f"{mean:.2f}"]
        cells += [f"{row[key]:.2f} ×" for key in ("ratio_at_mean", "ratio", "predicted")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
