# SPDX-License-Identifier: Apache-2.0
"""Processes that say nothing: those that do something go on."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from vllm.utils import silence
from vllm.utils.silence import Silence


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LIMIT_S", 0.5)
    monkeypatch.setattr(silence, "SILENT_S", 0.2)


def looks(listened: Silence, seconds: float, says: bool = False) -> str | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if says:
            listened.end()
        if (found := listened.look()) is not None:
            return found
        time.sleep(0.05)
    return None


def test_who_works_and_who_speaks_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            listened = Silence(process.pid)
            assert looks(listened, 1.0) is None
            psutil.Process(process.pid).suspend()
            assert looks(listened, 1.0, says=True) is None
            with monkeypatch.context() as patch:
                patch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "60")
                assert looks(listened, 1.0) is None
            assert "says nothing and does nothing for 0.5 s" in (looks(listened, 60.0) or "")
        finally:
            process.kill()


def test_a_pause_of_whoever_listens_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a whole server is stopped and goes on."""
    monkeypatch.setattr(silence, "LONGEST_LOOK_S", 0.1)
    listened = Silence(0)  # of whom nothing is seen
    time.sleep(0.7)
    assert listened.look() is None
