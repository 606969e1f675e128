# SPDX-License-Identifier: Apache-2.0
"""docs/adding_a_layer_kind.md explains code that is there: its files exist, its quotes are lines of
the file they name."""

from __future__ import annotations

import re

from tests.docs.commands import ROOT
from vllm.kernels.interface import Kernels

TEXT = (ROOT / "docs" / "adding_a_layer_kind.md").read_text()


def test_its_files_exist() -> None:
    paths = re.findall(r"`((?:vllm|tests)/[\w/.]+)`", TEXT)
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_its_quotes_are_lines_of_the_files_that_they_name() -> None:
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == TEXT.count("```python")
    for path, block in blocks:
        lines = (ROOT / path).read_text().splitlines()
        assert [line for line in block.splitlines() if line not in lines] == [], path


def test_the_ops_that_it_adds_are_in_the_table() -> None:
    table = {op.name: op for op in Kernels.ops()}
    folder = "vllm.model_executor.layers.fla.ops.kda"
    assert {name for name, op in table.items() if op.package == folder} == {
        "kda_prefill",
        "kda_decode",
        "kda_commit",
    }
