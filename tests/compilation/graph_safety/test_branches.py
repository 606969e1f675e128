# SPDX-License-Identifier: Apache-2.0
"""Of a branch on the step's data the static pass and the simulated captures say the same."""

from __future__ import annotations

from tests.compilation.graph_safety.samples import branches, replayed
from tests.compilation.graph_safety.test_planted import SAMPLES, expected
from vllm.compilation.graph_safety.simulator.functions import check_replays
from vllm.compilation.graph_safety.targets import check_file

PATH = SAMPLES / "branches.py"


def test_the_static_pass() -> None:
    found = {(finding.line, finding.hazard) for finding in check_file(PATH).findings}
    assert found == expected(PATH)


def test_simulated_captures() -> None:
    reports = [check_replays(module(), replayed.steps()) for module in branches.MODULES]
    found = {(finding.line, finding.hazard) for report in reports for finding in report.findings}
    assert found == expected(PATH)
