# SPDX-License-Identifier: Apache-2.0
"""Variables that one module's tests set are not there for the next module's."""

from __future__ import annotations

from pathlib import Path

from tests.forked_python import run_python

SETS = """
import os
import pytest

@pytest.fixture(scope="module")
def trained():
    os.environ["VLLM_LEFT_BEHIND"] = "1"  # as a library does that is used

def test_with_it(trained):
    assert "VLLM_LEFT_BEHIND" in os.environ
"""
MISSES = """
import os

def test_without_it():
    assert "VLLM_LEFT_BEHIND" not in os.environ
"""


def test_what_a_fixture_of_a_module_set_ends_with_it(tmp_path: Path) -> None:
    fixtures = "from tests.conftest import _own_settings, _own_settings_of_a_module\n"
    (tmp_path / "conftest.py").write_text(fixtures)
    (tmp_path / "test_first.py").write_text(SETS)
    (tmp_path / "test_second.py").write_text(MISSES)
    done = run_python("pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    assert "2 passed" in done.stdout, done.stdout
