# SPDX-License-Identifier: Apache-2.0
"""What a check found, as a table, JSON and SARIF 2.1.0."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from vllm.compilation.graph_safety.hazards import HAZARDS
from vllm.compilation.graph_safety.scan import Scan
from vllm.compilation.graph_safety.walker import Finding
from vllm.version import __version__

CHECKS_RUN = "static pass: source only, no tensor was computed"
CHECKS_LEFT = (
    "not run here: synchronisation, capture, replay against eager and allocations on a GPU; "
    "the tests of the tree are `pytest tests/gpu`"
)
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_FILE = Path(__file__).with_name("allowed.json")


@dataclass(frozen=True)
class Captured:
    """A layer, or a step of a model by kind and size: whether it could be captured; of how many
    replays how many computed something else than an eager run, or nothing, and the largest
    difference between the results of both (None where none could be compared)."""

    name: str
    captured: bool
    replays: int = 0
    stale: int = 0
    max_difference: float | None = None


@dataclass(frozen=True)
class Report:
    """`target`: what was checked; `functions`: names of all that were walked; `findings` that
    nothing allows; `allowed`: those that the allow-list lets pass; `cut`:
    functions of which calls were not followed, for they lay too deep; `checks`: what was run,
    `left`: what was not; `captures`: what was replayed."""

    target: str
    functions: tuple[str, ...]
    findings: tuple[Finding, ...]
    allowed: tuple[tuple[Finding, Allowance], ...]
    modes: dict[Finding, str]
    cut: tuple[str, ...]
    checks: tuple[str, ...] = (CHECKS_RUN,)
    left: tuple[str, ...] = (CHECKS_LEFT,)
    captures: tuple[Captured, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not self.findings


def make_report(target: str, scan: Scan) -> Report:
    """The findings of a pass, less what is allowed."""
    modes = {finding: mode.value for finding, mode in scan.findings.items()}
    functions = tuple(sorted(scan.functions))
    return join_report(target, modes, functions=functions, cut=tuple(sorted(scan.cut)))


def join_report(
    target: str,
    modes: Mapping[Finding, str],
    *,
    functions: tuple[str, ...] = (),
    cut: tuple[str, ...] = (),
    checks: tuple[str, ...] = (CHECKS_RUN,),
    left: tuple[str, ...] = (CHECKS_LEFT,),
    captures: tuple[Captured, ...] = (),
) -> Report:
    """Findings with where each runs (`modes`), less what is allowed."""
    found = sorted(modes)
    allowed = [(one, entry) for one in found for entry in allowances() if entry.covers(one)]
    passed = {finding for finding, _ in allowed}
    rest = tuple(finding for finding in found if finding not in passed)
    shown = tuple(allowed)
    return Report(target, functions, rest, shown, dict(modes), cut, checks, left, captures)


def place(path: str) -> str:
    """A path as short as it can be said from the current directory."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def as_table(reports: list[Report]) -> str:
    """One block per finding: place and hazard, the code, the replacement."""
    lines: list[str] = []
    for report in reports:
        for finding in report.findings:
            hazard = HAZARDS[finding.hazard]
            where = f"{place(finding.path)}:{finding.line}:{finding.column}"
            lines += [
                f"{where}  #{hazard.number} {hazard.title}",
                f"    {finding.code}",
                f"    {finding.message} ({report.modes[finding]}, {finding.function})",
                f"    instead: {hazard.replacement}",
                "",
            ]
        count = len(report.findings)
        found = "no hazard" if not count else f"{count} hazard{'s' if count > 1 else ''}"
        walked = f"{len(report.functions)} functions walked"
        if report.cut:
            lines.append(f"not followed, too deep: {', '.join(report.cut)}")
        lines.append(f"{report.target}: {found}; {len(report.allowed)} allowed; {walked}")
    return "\n".join([*lines, *_once(r.checks for r in reports), *_once(r.left for r in reports)])


def _once(checks: Iterable[tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(checks)))


def as_json(reports: list[Report]) -> dict[str, Any]:
    """`targets`, each with `findings` and `allowed`, and `captures` of what was replayed; what was
    checked and what was not."""
    return {
        "version": __version__,
        "checks_run": _once(r.checks for r in reports),
        "checks_left": _once(r.left for r in reports),
        "targets": [
            {
                "target": report.target,
                "checks_run": list(report.checks),
                "checks_left": list(report.left),
                "functions_walked": len(report.functions),
                "captures": [asdict(one) for one in report.captures],
                "not_followed": list(report.cut),
                "findings": [_finding(report, finding) for finding in report.findings],
                "allowed": [
                    {**_finding(report, finding), "reason": one.reason}
                    for finding, one in report.allowed
                ],
            }
            for report in reports
        ],
    }


def _finding(report: Report, finding: Finding) -> dict[str, Any]:
    hazard = HAZARDS[finding.hazard]
    return {
        "file": place(finding.path),
        "line": finding.line,
        "column": finding.column,
        "function": finding.function,
        "where": report.modes[finding],
        "hazard": hazard.number,
        "title": hazard.title,
        "message": finding.message,
        "code": finding.code,
        "replacement": hazard.replacement,
    }


def as_sarif(reports: list[Report]) -> dict[str, Any]:
    """For code-scanning services; what is allowed is a suppressed result with its reason."""
    results = []
    for report in reports:
        results += [_result(finding, None) for finding in report.findings]
        results += [_result(finding, one.reason) for finding, one in report.allowed]
    rules = [
        {
            "id": f"graph-{hazard.number}",
            "shortDescription": {"text": hazard.title},
            "help": {"text": f"Instead: {hazard.replacement}."},
        }
        for hazard in HAZARDS.values()
    ]
    driver = {"name": "vllm graph-check", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "utf16CodeUnits", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding, reason: str | None) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column}
    shown = place(finding.path)
    uri = Path(shown).as_uri() if os.path.isabs(shown) else Path(shown).as_posix()
    text = f"{finding.message}. Instead: {HAZARDS[finding.hazard].replacement}."
    result: dict[str, Any] = {
        "ruleId": f"graph-{finding.hazard}",
        "level": "error",
        "message": {"text": text},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}],
    }
    if reason is not None:
        result["suppressions"] = [{"kind": "external", "justification": reason}]
    return result


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
