# SPDX-License-Identifier: Apache-2.0
"""docs/adding_a_model.md names files, classes and lists that are there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.commands import ROOT
from vllm.model_executor.models import causal_lm, decoder, hybrid, llama, utils

TEXT = (ROOT / "docs" / "adding_a_model.md").read_text()
#: where paths of the text begin
FOLDERS = ("", "vllm/model_executor", "vllm/model_executor/layers", "tests/model_executor/models")


def test_its_files_exist() -> None:
    paths = re.findall(r"`([\w/]+\.py)`", TEXT)
    assert len(paths) > 15
    assert [
        path for path in paths if not any((ROOT / one / path).exists() for one in FOLDERS)
    ] == []


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE), (causal_lm, decoder, hybrid, llama)),
        (["rotary", "gated_mlp", "head_dim", "sliding_window", "extract_layer_index"], (utils,)),
        (["serves_only"], (utils,)),
    ],
)
def test_its_names_are_there(names: list[str], modules: tuple[ModuleType, ...]) -> None:
    assert names and all(f"`{name}" in TEXT for name in names)
    assert [n for n in names if not any(n in vars(module) for module in modules)] == []


def test_its_lists_are_in_the_files_that_it_names() -> None:
    for name, path in (
        ("CONFIGS", "tests/tiny_configs.py"),
        ("_SCALES", "tests/tiny_models.py"),
        ("PARTS_OF_OTHERS", "tests/parity/test_ranks.py"),
        ("ELSEWHERE", "tests/parity/test_ranks.py"),
        ("ELSEWHERE", "tests/compilation/graph_safety/test_registries.py"),
        ("FAMILY_SHAPES", "tests/entrypoints/family_templates.py"),
        ("RELEASED", "tests/model_executor/models/test_released_names.py"),
        ("RELEASED", "tests/config/test_family_generation_configs.py"),
        ("_OWN_CONFIGS", "vllm/transformers_utils/config.py"),
    ):
        assert name in TEXT and (path in TEXT or f"`{Path(path).name}` beside" in TEXT)
        assert re.search(rf"^{name}\b.* = ", (ROOT / path).read_text(), re.MULTILINE), name
