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


def compared(what: str, unit: str, ours: float, peer: float, higher_is_better: bool) -> str:
    ratio = ours / peer if higher_is_better else peer / ours
    digits = 0 if max(ours, peer) >= 1000 else 2
    return f"| {what} | {ours:,.{digits}f} {unit} | {peer:,.{digits}f} {unit} | {ratio:.2f} × |"
