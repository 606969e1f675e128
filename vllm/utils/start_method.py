# SPDX-License-Identifier: Apache-2.0
"""Whether this process may be forked. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from vllm import decisions, envs
from vllm.utils.own_process import OwnProcess
from vllm.utils.parent_watch import ParentWatch

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)[-.]")
#: `omp_pause_hard` of OpenMP 5.0
_PAUSE_HARD = 2
_DRIVER = "libcuda.so.1"
#: `CUDA_ERROR_NOT_INITIALIZED`
_NOT_INITIALISED = 3
_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
#: the process that is in a block of `spawning`
_spawning: OwnProcess | None = None


def start_method(what: str = "engine core") -> str:
    """How to start a process for `what`: `VLLM_WORKER_MULTIPROC_METHOD`, unless forking would be
    unsafe. Forking is what a script without `if __name__ == "__main__":` needs; where it is the
    answer, OpenMP's threads have been ended for it."""
    asked = envs.VLLM_WORKER_MULTIPROC_METHOD
    if asked != "fork":
        return asked
    if _VARIABLE not in os.environ and _spawning is not None and _spawning.is_own:
        return "spawn"
    reason = reason_not_to_fork()
    if reason is None:
        return asked
    decisions.record(f"{what} start method", "spawn", reason, instead_of="fork")
    return "spawn"


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Inside the block this process may run threads that Python does not know: by default
    `start_method` is to spawn. Processes that it starts have none of them and choose anew."""
    global _spawning
    _spawning = OwnProcess()
    try:
        yield
    finally:
        _spawning = None


def reason_not_to_fork() -> str | None:
    """What makes forking this process unsafe; None if nothing does, OpenMP's threads being ended
    for it."""
    if cuda_is_initialised():
        return "CUDA is initialised in this process and cannot be used in a forked one"
    if "ray" in sys.modules:
        return "Ray is imported in this process, and its connections do not survive a fork"
    if _other_threads():
        return "this process runs threads, whose locks a forked process would inherit"
    if not _end_openmp_threads():
        return "OpenMP's threads do not end, and a forked process would wait for them"
    return None


def cuda_is_initialised() -> bool:
    """Whether anything in this process has initialised the CUDA driver, which then refuses to work
    in its forks. `torch.cuda.is_available()` does so, and `torch.cuda.is_initialized()` is False
    after it."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    context = ctypes.c_void_p()
    return bool(driver.cuCtxGetCurrent(ctypes.byref(context)) != _NOT_INITIALISED)


def _other_threads() -> list[threading.Thread]:
    """Threads besides this one, the watch for the parent's death and the monitor of progress bars,
    which hold no lock of ours."""
    from tqdm import TMonitor

    harmless = (TMonitor, ParentWatch)
    current = threading.current_thread()
    return [t for t in threading.enumerate() if t is not current and not isinstance(t, harmless)]


def _end_openmp_threads() -> bool:
    """End the threads of OpenMP, if this thread has any; they come back when they are needed.

    A forked process has none of them, but believes it has, and its first parallel loop (a copy of a
    large tensor, say) waits for them for ever. False: a library does not let them end.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in {line.split()[-1] for line in lines if _OPENMP.search(line)}:
        try:
            pause = ctypes.CDLL(path).omp_pause_resource_all
        except (OSError, AttributeError):
            return False
        if pause(_PAUSE_HARD) != 0:
            return False
    return True
