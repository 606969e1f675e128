# SPDX-License-Identifier: Apache-2.0
"""What a check found, as a table, JSON and SARIF 2.1.0."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.compilation.graph_safety.allow_list import Allowance, allowances
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


@dataclass(frozen=True)
class Report:
    """`target`: what was checked; `functions`: names of all that were walked; `findings` that
    nothing allows; `allowed`: those that the allow-list lets pass; `cut`:
    functions of which calls were not followed, for they lay too deep."""

    target: str
    functions: tuple[str, ...]
    findings: tuple[Finding, ...]
    allowed: tuple[tuple[Finding, Allowance], ...]
    modes: dict[Finding, str]
    cut: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return not self.findings


def make_report(target: str, scan: Scan) -> Report:
    """The findings of a pass, less what is allowed."""
    allowed = [
        (finding, one)
        for finding in sorted(scan.findings)
        for one in allowances()
        if one.covers(finding)
    ]
    passed = {finding for finding, _ in allowed}
    left = tuple(finding for finding in sorted(scan.findings) if finding not in passed)
    modes = {finding: mode.value for finding, mode in scan.findings.items()}
    return Report(
        target, tuple(sorted(scan.functions)), left, tuple(allowed), modes, tuple(sorted(scan.cut))
    )


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
    return "\n".join([*lines, CHECKS_RUN, CHECKS_LEFT])


def as_json(reports: list[Report]) -> dict[str, Any]:
    """`targets`, each with `findings` and `allowed`; what was checked and what was not."""
    return {
        "version": __version__,
        "checks_run": [CHECKS_RUN],
        "checks_left": [CHECKS_LEFT],
        "targets": [
            {
                "target": report.target,
                "functions_walked": len(report.functions),
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
        if hazard.static
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
