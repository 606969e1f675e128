# SPDX-License-Identifier: Apache-2.0
"""Files for results are looked at before what takes long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm.entrypoints.cli.main import main
from vllm.exceptions import VLLMValidationError
from vllm.utils.result_file import check_file


def test_what_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    for path in (None, tmp_path / "new.json", str(tmp_path / "old.json"), "here.json", "/dev/null"):
        check_file("output_json", path)


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, reason in ((tmp_path / "no" / "x", "no folder"), (tmp_path, "it is a folder")):
        with pytest.raises(VLLMValidationError, match=f"--output-json {path}: {reason}"):
            check_file("output_json", path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(VLLMValidationError, match="--output-json .*: it cannot be written"):
        check_file("output_json", tmp_path / "x")


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("bench latency", "--output-json"),
        ("bench throughput", "--output-json"),
        ("bench startup", "--output-json"),
        ("bench acceptance", "--output-json"),
        ("bench acceptance", "--plot"),
        ("bench serve", "--plot"),
        ("bench serve --save-result", "--result-filename"),
        ("graph-check x.py", "--json"),
        ("graph-check x.py", "--sarif"),
    ],
)
def test_commands_look_first(
    command: str, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what follows is there: no model, no server."""
    assert main([*command.split(), flag, "no/such/folder/x.png"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f": error: {flag} no/such/folder/x.png: no folder no/such/folder" in last


def test_a_folder_that_cannot_be_made_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--save-result", "--result-dir", "/dev/null/x"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error: --result-dir /dev/null/x: Not a directory" in last
