# SPDX-License-Identifier: Apache-2.0
"""An example as its user runs it: a program of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.forked_python import CapturedPython, run_python

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "examples" / "models" / "tiny-qwen3_5-code"
DRAFTER = ROOT / "examples" / "models" / "tiny-qwen3_5-code-eagle3"


def start(name: str, *arguments: str) -> CapturedPython:
    """`python examples/NAME.py ARGUMENTS`."""
    return CapturedPython(str(ROOT / "examples" / f"{name}.py"), *arguments)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(str(ROOT / "examples" / f"{name}.py"), *arguments, timeout=280)


def wait_for(condition: Callable[[], bool], process: CapturedPython) -> None:
    """Poll often, so that the caller acts at once; fails if the process ends first."""
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited for four minutes"
        time.sleep(0.01)


def children(process: CapturedPython) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    """All of them end soon."""
    assert processes
    alive = psutil.wait_procs(processes, timeout=90)[1]
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
