# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the config and engine-argument tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config.checkpoints import write_config
from vllm import decisions


@pytest.fixture(autouse=True)
def fresh_decisions() -> Iterator[None]:
    decisions.clear()
    yield
    decisions.clear()


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return write_config(tmp_path / "llama", "llama")


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    """Of experts."""
    return write_config(tmp_path / "mixture", "mixture")


@pytest.fixture
def hybrid(tmp_path: Path) -> str:
    return write_config(tmp_path / "hybrid", "hybrid")
