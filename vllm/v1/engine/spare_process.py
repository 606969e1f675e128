# SPDX-License-Identifier: Apache-2.0
"""The engine core's process, started before there is a configuration for it.

It imports what a core needs and initialises the device while its parent imports what a front end
needs and reads the configuration. torch and transformers, which both need, take seconds: a process
that is forked has them from its parent, one that is spawned imports them at the same time. This
module imports nothing heavy, so that a process can be spawned as the first thing of a start.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vllm.utils import interrupts
from vllm.utils.fork_server import start
from vllm.utils.imports import gc_paused, import_heavy_modules, short_turns
from vllm.utils.start_method import start_method

if TYPE_CHECKING:
    from vllm.v1.engine.core_messages import CoreAddresses


class SpareProcess:
    """A process that imports the engine core, then waits to be told what to run.

    `environment`: variables of its own, which it sets before it looks for a device.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        work, self._give = multiprocessing.Pipe(duplex=False)
        #: where the core says that it is ready
        self.ready, child_ready = multiprocessing.Pipe(duplex=False)
        args = (work, child_ready, dict(environment or {}))
        self.process = start("engine core", _run, args, "vllm-engine-core")
        work.close()
        child_ready.close()

    def give(self, setup: bytes, addresses: CoreAddresses) -> None:
        """What `run_engine_core` waits for; OSError when the process is gone."""
        self._give.send((setup, addresses))
        self._give.close()

    def connections(self) -> tuple[Connection, ...]:
        """This process's ends of pipes, which no other one may hold."""
        return self._give, self.ready

    def discard(self) -> None:
        """Not needed after all: end the process, which has done nothing yet."""
        self._give.close()
        self.ready.close()
        self.process.kill()
        self.process.join()


_spare: SpareProcess | None = None


@contextmanager
def prestarted() -> Iterator[None]:
    """An engine core that is started inside the block uses a process that starts now, or one that
    is there already."""
    global _spare
    if _spare is None:
        if start_method() == "fork":
            import_heavy_modules()
        with interrupts.interrupts_wait():  # until it is known, and ended with this one
            _spare = SpareProcess()
    try:
        import_heavy_modules()
        yield
    finally:
        _discard_unused()


def connections() -> tuple[Connection, ...]:
    """Those of the process that was started, while it is not taken."""
    return () if _spare is None else _spare.connections()


def take() -> SpareProcess | None:
    """The process that was started, once, if it is still alive."""
    global _spare
    spare, _spare = _spare, None
    if spare is not None and not spare.process.is_alive():
        spare.discard()
        return None
    return spare


def _discard_unused() -> None:
    if (unused := take()) is not None:
        unused.discard()


interrupts.end_too(_discard_unused)


def _run(work: Connection, ready: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from vllm.kernels.triton.compiler_start import start_on_a_thread
    from vllm.platforms.cuda_driver import initialise_on_a_thread

    # Asking for the platform would wait for the driver.
    if initialise_on_a_thread() is not None:
        start_on_a_thread()
    with gc_paused(), short_turns():
        import_heavy_modules()
        from vllm.v1.engine.core_proc import run_engine_core

    run_engine_core(work, ready)
