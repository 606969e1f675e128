# SPDX-License-Identifier: Apache-2.0
"""Starting, watching and ending the engine core's process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.exceptions import ExplainedError
from vllm.utils import startup_phases
from vllm.utils.activity import is_stopped
from vllm.utils.exit_status import ending_signal, how_it_ended
from vllm.utils.silence import BEAT_S, Silence
from vllm.v1.engine import spare_process
from vllm.v1.engine.core_messages import CoreAddresses, CoreReady, CoreSetup
from vllm.v1.serial_utils import pickle_setup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor

_TERMINATE_S = 5.0
_SLICE_S = 1.0


class CoreKilledError(ExplainedError, RuntimeError):
    """A core was ended from outside before it could take requests."""


class CoreProcess:
    """The core's process, from start to exit.

    `environment`: variables that the process needs before it looks for its device; None takes the
    process that has been started before there was a configuration, which sees this one's devices.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        addresses: CoreAddresses,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        setup = pickle_setup(CoreSetup(vllm_config, executor_class, log_stats))
        startup_phases.begin("spawn engine")
        self._began_s = time.monotonic()
        spare = spare_process.take() if environment is None else None
        spare = spare or spare_process.SpareProcess(environment=environment)
        self.process = spare.process
        #: the core says here that it is ready, and then once a second that it goes on
        self.words: Connection = spare.ready
        self._silence: Silence | None = None
        self._listened_s = 0.0
        #: why it was ended
        self.hang: str | None = None
        with contextlib.suppress(OSError):  # it died: `wait_ready` says so
            spare.give(setup, addresses)

    def wait_ready(self) -> CoreReady:
        """Block until the core can take requests.

        Raises the core's own `ExplainedError`, or `ValueError` for a bad configuration,
        `CoreKilledError` when it was ended, `RuntimeError` when it failed otherwise or died,
        `TimeoutError` after `VLLM_ENGINE_READY_TIMEOUT_S`.
        """
        first_to_report([self])
        timeout_s, words = envs.VLLM_ENGINE_READY_TIMEOUT_S, self.words
        try:
            message = words.recv() if words.poll() else None
        except EOFError:
            message = None
        if isinstance(message, CoreReady):
            assert self.process.pid is not None
            self._silence = Silence(self.process.pid)
            return message
        words.close()
        if isinstance(message, Exception):
            raise message
        self.process.join(1.0)
        if self.process.is_alive():
            raise TimeoutError(
                f"the engine core was not ready after {timeout_s} s (VLLM_ENGINE_READY_TIMEOUT_S)"
            )
        code = self.process.exitcode
        name = ending_signal(code)
        if name is not None:
            memory = ", as the system does where memory runs out" if name == "SIGKILL" else ""
            raise CoreKilledError(f"the engine core was ended by {name} while starting{memory}")
        raise RuntimeError(
            f"the engine core died while starting ({how_it_ended(code)}); its own "
            "messages are above. A script that is its own entry point needs the guard "
            "`if __name__ == '__main__':` when processes are spawned"
        )

    def listen(self) -> None:
        """Take what the ready core has said, and end it if it hangs: `hang` says why. At least once
        a second; more often is no more work."""
        assert self._silence is not None
        now_s = time.monotonic()
        if now_s - self._listened_s < BEAT_S:
            return
        self._listened_s = now_s
        with contextlib.suppress(EOFError):  # it has ended
            while self.words.poll():
                self.words.recv_bytes()
                self._silence.end()
        if self.hang is None and (hang := self._silence.look()) is not None:
            self.hang = f"its process {hang}"
            self.process.kill()

    def stop(self, timeout_s: float) -> None:
        """Wait for the process to end by itself, then terminate, then kill it."""
        if is_stopped(self.process.pid):  # which ends at nobody's word
            self.process.kill()
        self.process.join(max(0.0, timeout_s))
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_TERMINATE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.words.close()


def first_to_report(cores: Sequence[CoreProcess]) -> CoreProcess:
    """Block until one of these is ready or has failed, for as long as a start may take; the first
    of them if none is then."""
    sources: list[Any] = [
        source for core in cores for source in (core.words, core.process.sentinel)
    ]
    deadline = cores[0]._began_s + envs.VLLM_ENGINE_READY_TIMEOUT_S
    # In slices: a signal that arrives just before a wait is handled after it.
    while not (found := wait(sources, _SLICE_S)) and time.monotonic() < deadline:
        pass
    return cores[sources.index(found[0]) // 2] if found else cores[0]
