# SPDX-License-Identifier: Apache-2.0
"""Planted hazards are found at their lines, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm.compilation.graph_safety import scan
from vllm.compilation.graph_safety.hazards import HAZARDS
from vllm.compilation.graph_safety.report import as_table
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


@pytest.mark.parametrize(
    "name", ["planted", "upstream_style", "upstream_port", "outside_graphs", "clean"]
)
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


def test_calls_too_deep_are_cut_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_DEEPEST", 2)
    path = tmp_path / "deep.py"
    path.write_text(
        "from torch import Tensor\n"
        "def read(x: Tensor, n):\n"
        "    return x.item()\n"
        "def between(x: Tensor, n):\n"
        "    return read(x, (n, n))\n"
        "def deep(x: Tensor, n=()):\n"
        "    return between(x, n)\n"
    )
    report = check_file(path.with_name("deep.py:deep"))
    assert report.is_clean and report.cut == ("checked_deep.read",)
    assert "not followed, too deep: checked_deep.read" in as_table([report])


def test_a_recursion_ends(tmp_path: Path) -> None:
    path = tmp_path / "again.py"
    path.write_text(
        "from torch import Tensor\n"
        "def again(x: Tensor, rows=()):\n"
        "    return again(x, (rows, rows)) * x.item()\n"
    )
    assert [(f.line, f.hazard) for f in check_file(path).findings] == [(3, 1)]


def test_every_kind_of_layer_is_walked(tmp_path: Path) -> None:
    """A layer that differs from the others in a module is walked as well."""
    path = tmp_path / "layers.py"
    path.write_text(
        "from torch import Tensor, nn\n"
        "class A(nn.Module):\n"
        "    def forward(self, x: Tensor) -> Tensor:\n"
        "        return x\n"
        "class B(A):\n"
        "    def forward(self, x: Tensor) -> Tensor:\n"
        "        return x * float(x.sum())\n"
        "class Model(nn.Module):\n"
        "    def __init__(self) -> None:\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList([A(), A(), B()])\n"
        "    def forward(self, x: Tensor) -> Tensor:\n"
        "        for layer in self.layers:\n"
        "            x = layer(x)\n"
        "        return x\n"
    )
    report = check_file(path.with_name("layers.py:Model"))
    assert [(finding.line, finding.hazard) for finding in report.findings] == [(7, 1)]
