# SPDX-License-Identifier: Apache-2.0
"""An example as its user runs it: a program of its own."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "examples" / "models" / "tiny-qwen3_5-code"


def start(name: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """`python examples/NAME.py ARGUMENTS`, its output in `stdout` and `stderr`.

    It answers interrupts, even where these tests run in the background of a shell and ignore them.
    """
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start(name, *arguments)
    out, err = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Poll often, so that the caller acts at once; fails if the process ends first."""
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited for four minutes"
        time.sleep(0.01)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    """All of them end soon."""
    assert processes
    alive = psutil.wait_procs(processes, timeout=90)[1]
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
