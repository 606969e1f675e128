# SPDX-License-Identifier: Apache-2.0
"""Findings that are right where they are. The list may only shrink: a test knows its length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from vllm.compilation.graph_safety.walker import Finding

_FILE = Path(__file__).with_name("allowed.json")


@dataclass(frozen=True)
class Allowance:
    """Lets findings of one hazard pass in one function, or in all of a module (`module.*`), which
    is for modes that exist to look at the device; `reason` says why it does no harm there."""

    function: str
    hazard: int
    reason: str

    def covers(self, finding: Finding) -> bool:
        if self.function.endswith(".*"):
            inside = finding.function.startswith(self.function[:-1])
        else:
            inside = finding.function == self.function
        return inside and self.hazard == finding.hazard


@lru_cache(maxsize=1)
def allowances() -> tuple[Allowance, ...]:
    """The list. Raises ValueError for an entry without a reason."""
    found = tuple(Allowance(**entry) for entry in json.loads(_FILE.read_text(encoding="utf-8")))
    silent = [one.function for one in found if not one.reason.strip()]
    if silent:
        raise ValueError(f"{_FILE.name}: entries without a reason: {', '.join(silent)}")
    return found
