# SPDX-License-Identifier: Apache-2.0
"""A start that compiles all modules is told from one that finds them compiled."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from vllm.utils.bytecode import missing_bytecode

NAME = "module_that_tests_import"


def import_it(folder: Path, monkeypatch: pytest.MonkeyPatch, write: bool) -> None:
    (folder / f"{NAME}.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", not write)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    importlib.import_module(NAME)
    monkeypatch.setitem(sys.modules, NAME, sys.modules[NAME])


def test_compiled_modules_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_it(tmp_path, monkeypatch, write=True)
    assert missing_bytecode(NAME) is None


def test_who_forbids_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_it(tmp_path, monkeypatch, write=False)
    assert missing_bytecode(NAME) == "PYTHONDONTWRITEBYTECODE is set"


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__pycache__").write_text("in the way")
    import_it(tmp_path, monkeypatch, write=True)
    assert missing_bytecode(NAME) == f"{tmp_path / '__pycache__'} cannot be written"


def test_what_is_not_imported_costs_nothing() -> None:
    assert missing_bytecode("no_such_module") is None
