# SPDX-License-Identifier: Apache-2.0
"""A process is forked only where the fork can work, and then it can."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch  # noqa: F401  (its OpenMP library is what these tests are about)

from tests.forked_python import run_python
from vllm import decisions
from vllm.utils import start_method

#: the parent has OpenMP threads when the child begins; words: "skip" leaves them there
_SCRIPT = """
import multiprocessing, sys, torch
from vllm import decisions
from vllm.utils import start_method

def work():
    torch.randn(1 << 20).exp().sum()

torch.set_num_threads(2)
work()
if "skip" in sys.argv:
    start_method._end_openmp_threads = lambda: True
assert start_method.start_method() == "fork", decisions.decisions()
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join(3 if "skip" in sys.argv else 60)
alive = child.is_alive()
child.kill()
work()
sys.exit(3 if alive else child.exitcode)
"""


def _run(folder: Path, *words: str) -> int:
    script = folder / "forks.py"
    script.write_text(_SCRIPT)
    return run_python(str(script), *words).returncode


def test_a_forked_process_computes_although_its_parent_has(tmp_path: Path) -> None:
    assert _run(tmp_path) == 0


def test_openmp_would_have_kept_it_waiting(tmp_path: Path) -> None:
    assert _run(tmp_path, "skip") == 3


def test_openmp_that_does_not_let_go_forbids_forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "enumerate", list)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(start_method, "_end_openmp_threads", lambda: False)
    assert start_method.start_method() == "spawn"
    record = [d for d in decisions.decisions() if d.what == "engine core start method"][-1]
    assert record.chosen == "spawn" and "OpenMP" in record.why


def test_a_library_that_cannot_end_its_threads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_method, "_OPENMP", re.compile("/libm[-.]"))
    assert not start_method._end_openmp_threads()


def test_connections_of_ray_forbid_forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    log = decisions.DecisionLog()
    with log.current():
        assert start_method.start_method() == "spawn"
    (why,) = (one.why for one in log.decisions() if one.what.endswith("start method"))
    assert "Ray is imported" in why


@pytest.mark.parametrize(("result", "is_initialised"), [(3, False), (0, True), (201, True)])
def test_the_driver_says_whether_it_is_initialised(
    monkeypatch: pytest.MonkeyPatch, result: int, is_initialised: bool
) -> None:
    class Driver:
        def cuCtxGetCurrent(self, context: Any) -> int:
            return result

    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Driver())
    assert start_method.cuda_is_initialised() is is_initialised


def test_a_driver_that_is_not_loaded_stays_so() -> None:
    script = "from vllm.utils.start_method import cuda_is_initialised as asked; assert not asked()"
    maps = "assert 'libcuda.so' not in open('/proc/self/maps').read()"
    subprocess.run([sys.executable, "-c", f"{script}; {maps}"], check=True)


#: `torch.cuda.is_available()` makes forks useless, and `is_initialized()` stays False
_ASKED = """
import torch
from vllm.utils.start_method import start_method
assert start_method() == "fork"
assert torch.cuda.is_available() and not torch.cuda.is_initialized()
assert start_method() == "spawn"
"""


@pytest.mark.gpu
def test_a_process_that_asked_for_a_gpu_is_not_forked() -> None:
    subprocess.run([sys.executable, "-c", _ASKED], check=True)
