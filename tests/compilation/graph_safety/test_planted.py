# SPDX-License-Identifier: Apache-2.0
"""Planted hazards are found at their lines, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm.compilation.graph_safety.hazards import HAZARDS
from vllm.compilation.graph_safety.targets import check_file
from vllm.exceptions import VLLMValidationError

SAMPLES = Path(__file__).parent / "samples"
_MARK = re.compile(r"# ((?:\d+ ?)+)$")


def expected(path: Path) -> set[tuple[int, int]]:
    """`(line, hazard)` of every line that ends with a comment of numbers."""
    found = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if mark := _MARK.search(line):
            found |= {(number, int(hazard)) for hazard in mark[1].split()}
    return found


@pytest.mark.parametrize("name", ["planted", "upstream_style", "clean"])
def test_hazards_are_found_at_their_lines(name: str) -> None:
    path = SAMPLES / f"{name}.py"
    report = check_file(path)
    found = {(finding.line, finding.hazard) for finding in report.findings}
    assert {finding.path for finding in report.findings} <= {str(path)}
    assert found == expected(path)
    assert report.is_clean == (name == "clean")


def test_every_hazard_that_the_pass_looks_for_is_planted() -> None:
    planted = {hazard for _, hazard in expected(SAMPLES / "planted.py")}
    assert planted == {hazard.number for hazard in HAZARDS.values() if hazard.static}


def test_one_class_of_a_file() -> None:
    report = check_file(SAMPLES / "upstream_style.py:Router")
    assert [finding.hazard for finding in report.findings] == [19]
    assert "Router.forward" in report.findings[0].function


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("absent.py", None, "there is no file"),
        ("broken.py", "import a_module_that_does_not_exist", "cannot be imported"),
        ("empty.py", "x = 1", "defines neither modules"),
        ("few.py:Other", "def f(x: 'Tensor'): pass", "no module or function 'Other'; it has f"),
    ],
)
def test_what_cannot_be_checked(
    tmp_path: Path, name: str, source: str | None, message: str
) -> None:
    if source is not None:
        (tmp_path / name.partition(":")[0]).write_text(source)
    with pytest.raises(VLLMValidationError, match=message):
        check_file(tmp_path / name)
