# SPDX-License-Identifier: Apache-2.0
"""An example as its user runs it: a program of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from unittest import mock

import demo
import psutil

from tests.forked_python import CapturedPython, ForkedPython, run_python

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "examples" / "models" / "tiny-qwen3_5-code"
DRAFTER = ROOT / "examples" / "models" / "tiny-qwen3_5-code-eagle3"


def start(name: str, *arguments: str) -> CapturedPython:
    """`python examples/NAME.py ARGUMENTS`."""
    return CapturedPython(str(ROOT / "examples" / f"{name}.py"), *arguments)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(str(ROOT / "examples" / f"{name}.py"), *arguments, timeout=280)


def _start_server(command: list[str], log: IO[str]) -> ForkedPython:
    _, option, module, *rest = command
    assert option == "-m"
    return ForkedPython(module, rest, log, session=True)


@contextmanager
def forked_servers() -> Iterator[None]:
    """Each server of an example that runs here. A new interpreter, as `test_demo` starts for its
    users' sake, would import everything, for seconds."""
    with mock.patch.object(demo, "start_server", _start_server):
        yield


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
