# SPDX-License-Identifier: Apache-2.0
"""The engine core's process, started before there is a configuration for it.

A spawned process imports everything anew, for seconds. `vllm serve` starts it first, so that it
does so while the server reads its own imports and the configuration. This module imports nothing
heavy, for the same reason.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class SpareProcess:
    """A spawned process that imports the engine core, then waits to be told what to run."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        work, self._give = context.Pipe(duplex=False)
        #: where the core says that it is ready
        self.ready: Connection
        self.ready, child_ready = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(
            target=_run, args=(work, child_ready, os.getpid()), name="vllm-engine-core"
        )
        self.process.start()
        work.close()
        child_ready.close()

    def give(self, setup: bytes, addresses: Any) -> None:
        """What `run_engine_core` takes; OSError when the process is gone."""
        self._give.send((setup, addresses))
        self._give.close()

    def discard(self) -> None:
        """Not needed after all: end the process, which has done nothing yet."""
        self._give.close()
        self.ready.close()
        self.process.kill()
        self.process.join()


_spare: SpareProcess | None = None


@contextmanager
def prestarted() -> Iterator[None]:
    """An engine core that is started inside the block uses a process that starts now."""
    global _spare
    _spare = SpareProcess()
    try:
        yield
    finally:
        if (unused := take()) is not None:
            unused.discard()


def take() -> SpareProcess | None:
    """The process that was started, once, if it is still alive."""
    global _spare
    spare, _spare = _spare, None
    if spare is not None and not spare.process.is_alive():
        spare.discard()
        return None
    return spare


def _run(work: Connection, ready: Connection, parent_pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from vllm.v1.engine.core_proc import import_everything, run_engine_core

    import_everything()
    try:
        setup, addresses = work.recv()
    except EOFError:
        return
    work.close()
    run_engine_core(setup, addresses, ready, parent_pid)
