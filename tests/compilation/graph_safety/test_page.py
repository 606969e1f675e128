# SPDX-License-Identifier: Apache-2.0
"""docs/graph-safety.md says what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.compilation.graph_safety.samples.replayed_steps import PLANTS
from tests.compilation.graph_safety.test_planted import SAMPLES, expected
from vllm.compilation.graph_safety.hazards import BY_CALLS, HAZARDS, OF_ONE_SIDE, table

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "graph-safety.md").read_text()


def test_the_page_has_the_list() -> None:
    assert table() in PAGE
    assert list(HAZARDS) == list(range(1, 29))


def test_each_item_is_planted_for_both_sides_or_has_a_reason() -> None:
    """Those that are, `tests/gpu/test_planted_verdicts.py` runs on a GPU."""
    planted = {hazard for _, hazard in expected(SAMPLES / "replayed.py")}
    planted |= {plant.hazard for plant in PLANTS}
    assert planted.isdisjoint(OF_ONE_SIDE) and set(BY_CALLS) <= planted
    assert planted | set(OF_ONE_SIDE) == set(HAZARDS)
    for number, reason in (OF_ONE_SIDE | BY_CALLS).items():
        assert f"- {number}: {reason}" in PAGE


def _rows(title: str) -> list[list[str]]:
    """The cells of the table in a section."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_the_example_answers_what_is_found_in_a_first_version() -> None:
    """Items that replays alone tell are in it besides; what answers them is in the code."""
    items: set[int] = set()
    for numbers, *_, where in _rows("The example: DeepSeek-V4"):
        items |= {int(number) for number in numbers.split(", ")}
        path, *texts = re.findall(r"`([^`]+)`", where)
        source = (ROOT / path).read_text()
        assert texts and all(text in source for text in texts), where
    found = {hazard for _, hazard in expected(SAMPLES / "upstream_port.py")}
    assert found < items and {20, 21, 22} <= items


@pytest.mark.parametrize("file", sorted({h.gpu_test for h in HAZARDS.values()} - {""}))
def test_named_tests_exist_and_need_a_gpu(file: str) -> None:
    source = (ROOT / file).read_text()
    assert "pytest.mark.gpu" in source
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    assert any(function.name.startswith("test_") for function in functions)
