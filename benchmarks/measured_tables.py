# SPDX-License-Identifier: Apache-2.0
"""What the tables of measurements share: the files, and a row beside another system's figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "measurements"


def load(name: str) -> Any:
    """A measurement, as the benchmark wrote it."""
    return json.loads((DATA / name).read_text())


def rounded(figure: float, unit: str, digits: int | None = None) -> str:
    """A cell: with `digits` behind the point, or as many as the figure's size asks for."""
    if digits is None:
        digits = 0 if figure >= 1000 else 2
    return f"{figure:,.{digits}f} {unit}"


def compared(what: str, unit: str, ours: float, peer: float, higher_is_better: bool) -> str:
    ratio = ours / peer if higher_is_better else peer / ours
    digits = 0 if max(ours, peer) >= 1000 else 2
    cells = (rounded(figure, unit, digits) for figure in (ours, peer))
    return f"| {what} | {' | '.join(cells)} | {ratio:.2f} × |"
