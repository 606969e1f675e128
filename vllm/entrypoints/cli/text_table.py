# SPDX-License-Identifier: Apache-2.0
"""Tables, amounts and decisions for a terminal."""

from collections.abc import Iterable, Iterator, Sequence

from vllm.decisions import Decision

_LEFT = ("one layer keeps", "")


def amount(num_bytes: float) -> str:
    """Bytes in decimal units: `51.5 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            scaled = num_bytes / factor
            return f"{scaled:,.0f} {unit}" if scaled >= 1000 else f"{scaled:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: text (the first, and any with letters) to the left, numbers to the right."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    left = [i == 0 or columns[i] in _LEFT for i in range(len(columns))]
    return [
        "  " + "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in cells
    ]  # fmt: skip


def decision_lines(decisions: Iterable[Decision]) -> Iterator[str]:
    """A line for each."""
    for decision in decisions:
        rejected = f" instead of {decision.instead_of}" if decision.instead_of else ""
        yield f"{decision.what}: {decision.chosen}{rejected} ({decision.why})"
