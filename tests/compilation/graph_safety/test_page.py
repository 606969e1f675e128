# SPDX-License-Identifier: Apache-2.0
"""docs/graph-safety.md says what the code says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vllm.compilation.graph_safety.hazards import HAZARDS, table

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "graph-safety.md").read_text()


def test_the_page_has_the_list() -> None:
    assert table() in PAGE
    assert list(HAZARDS) == list(range(1, 28))


@pytest.mark.parametrize("file", sorted({h.gpu_test for h in HAZARDS.values()} - {""}))
def test_named_tests_exist_and_need_a_gpu(file: str) -> None:
    source = (ROOT / file).read_text()
    assert "pytest.mark.gpu" in source
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    assert any(function.name.startswith("test_") for function in functions)
