# SPDX-License-Identifier: Apache-2.0
"""`docs/cli.md` is what the config dataclasses say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from vllm.engine.arg_utils import FLAG_SPECS
from vllm.engine.unsupported_flags import UNSUPPORTED_FLAGS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_cli", DOCS / "generate_cli.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_current(generator: ModuleType) -> None:
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == generator.render()


def test_every_flag_is_listed(generator: ModuleType) -> None:
    text = generator.render()
    for name in [s.name for s in FLAG_SPECS] + list(UNSUPPORTED_FLAGS):
        assert f"`--{name.replace('_', '-')}`" in text


def test_check_notices_an_old_file(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "TARGET", tmp_path / "cli.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    (tmp_path / "cli.md").write_text("old")
    assert generator.main(["--check"]) == 1
