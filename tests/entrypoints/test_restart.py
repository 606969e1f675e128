# SPDX-License-Identifier: Apache-2.0
"""How often a server that fails starts anew (tests/e2e/test_process.py has one that does)."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

import pytest

from vllm.entrypoints import restart


class Replaced(Exception):
    """In place of the new program."""


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that have been run."""
    lines: list[list[str]] = []

    def execv(path: str, line: list[str]) -> NoReturn:
        assert path == sys.executable
        lines.append(line)
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "vllm", "serve", "model"])
    monkeypatch.setattr(restart, "_stop_asked", False)
    monkeypatch.delenv("VLLM_RESTARTS", raising=False)
    return lines


def test_the_same_command_runs_at_most_three_times_an_hour(programs: list[list[str]]) -> None:
    for _ in range(restart.MOST_RESTARTS):
        with pytest.raises(Replaced):
            restart.restart()
    restart.restart()
    assert programs == [[sys.executable, "-m", "vllm", "serve", "model"]] * 3


def test_restarts_of_an_hour_ago_do_not_count(
    programs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = time.time() - restart.WITHIN_S - 1
    monkeypatch.setenv("VLLM_RESTARTS", ",".join([str(long_ago)] * 3))
    with pytest.raises(Replaced):
        restart.restart()
    assert len(os.environ["VLLM_RESTARTS"].split(",")) == 1


def test_who_was_asked_to_stop_stays_down(programs: list[list[str]]) -> None:
    restart.note_stop()
    restart.restart()
    assert not programs
