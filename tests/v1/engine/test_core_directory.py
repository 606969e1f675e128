# SPDX-License-Identifier: Apache-2.0
"""Where the sockets between an engine core and its clients are."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.core_client import _make_directory


def test_it_is_below_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    assert Path(_make_directory()).parent == tmp_path


def test_a_base_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/no/such/folder")
    with pytest.raises(VLLMValidationError, match="VLLM_RPC_BASE_PATH=/no/such/folder: .*No such"):
        _make_directory()
