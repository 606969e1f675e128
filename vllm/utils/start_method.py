# SPDX-License-Identifier: Apache-2.0
"""Whether this process may be forked. Imports nothing heavy."""

from __future__ import annotations

import sys
import threading

from vllm import decisions, envs


def start_method() -> str:
    """How to start the engine's process: `VLLM_WORKER_MULTIPROC_METHOD`, unless forking would be
    unsafe."""
    asked = envs.VLLM_WORKER_MULTIPROC_METHOD
    if asked != "fork":
        return asked
    reason = None
    if _uses_cuda():
        reason = "CUDA is initialised in this process and cannot be used in a forked one"
    elif _other_threads():
        reason = "this process runs threads, whose locks a forked process would inherit"
    if reason is None:
        return asked
    decisions.record("engine core start method", "spawn", reason, instead_of="fork")
    return "spawn"


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _other_threads() -> list[threading.Thread]:
    """Threads besides this one and the monitor of progress bars, which holds no lock of ours."""
    from tqdm import TMonitor

    current = threading.current_thread()
    return [t for t in threading.enumerate() if t is not current and not isinstance(t, TMonitor)]
