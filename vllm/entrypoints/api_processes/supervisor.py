# SPDX-License-Identifier: Apache-2.0
"""Starts, watches and ends the API processes of one engine, whose cores are this process's
children."""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
from collections.abc import Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.entrypoints.api_processes.control import ControlPort, Handlers, PeerGoneError
from vllm.entrypoints.api_processes.process import ApiSetup, JointState, run_api_process
from vllm.entrypoints.api_processes.together import (
    JointMetrics,
    JointPlacement,
    JointSleep,
    tell_all,
)
from vllm.entrypoints.launcher import stop_start_at_signals
from vllm.entrypoints.listening import refuse_other_servers, remove_own_files
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.entrypoints.restart import note_stop
from vllm.entrypoints.tally import Tallies
from vllm.logger import init_logger
from vllm.utils.fork_server import ForkError, start
from vllm.utils.own_directory import make_directory, remove_directory
from vllm.utils.silence import BEAT_S, Silence
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_client import AsyncMPClient
from vllm.v1.engine.core_link import RunningCore
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.replica_board import BoardShare
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import pickle_setup

logger = init_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXIT_FORCED = 130
#: beyond --shutdown-timeout: for last words, and for an engine's death to be told
_GRACE_S = 10.0
#: processes in a row that die before they serve: then the server stops
_MOST_FAILED_STARTS = 3


class _ApiProcess:
    """A process at one of the places, from its start to its end."""

    def __init__(self, place: int, sock: socket.socket) -> None:
        self.place = place
        self.client_index = 0
        self.port: ControlPort | None = None
        self.is_ready = False
        self.pipe: Connection
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = start("API process", run_api_process, (theirs, sock), f"vllm-api-{place}")
        theirs.close()
        assert self.process.pid is not None
        self._silence = Silence(self.process.pid)
        self._asking: asyncio.Task[Any] | None = None

    def listen(self) -> str | None:
        """Ask whether it goes on; what is wrong with it, None if nothing is. Once a second."""
        asked = self._asking
        if self.port is None or not self.is_ready or (asked is not None and asked.done()):
            self._silence.end()
            self._asking = None
        if self.port is not None and self.is_ready and self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(_tell(self.port, "say_something"))
        return self._silence.look()

    def kill(self) -> None:
        """End it now."""
        self.process.kill()
        self.process.join()


class Supervisor:
    """The core of each replica, and a process at each of `sockets`, which stay open here: what
    connects while a process is being replaced waits for the next one."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        args: FrontEndArgs,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
    ) -> None:
        self._sockets = sockets
        self._args = args
        self._vllm_config = vllm_config
        self._executor_class = executor_class
        self._log_stats = log_stats
        self._indices = itertools.count(1)
        self._failed_starts = 0
        self._stopping = False
        self._exit_code = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._all_gone: asyncio.Event
        self._directory: str
        self._core: AsyncMPClient
        self._metrics: JointMetrics
        self._sleep: JointSleep
        self._placement: JointPlacement
        self._tallies: Tallies
        #: of several replicas
        self._board_path: str | None = None
        self._processes: dict[int, _ApiProcess] = {}

    def run(self) -> int:
        """Serve until a signal, the engine's death or what --api-server-death says; returns the
        exit status. A failing start raises."""
        stop_start_at_signals()
        self._directory = make_directory()
        try:
            return asyncio.run(self._serve(Path(self._directory)))
        finally:
            for process in self._processes.values():
                process.kill()
            remove_directory(self._directory)

    # ---- start ---------------------------------------------------------------------------------

    async def _serve(self, directory: Path) -> int:
        self._all_gone = asyncio.Event()
        num_places = len(self._sockets)
        if len(self._vllm_config.parallel_config.local_ranks) > 1:
            self._board_path = str(directory / "replicas")
        share = BoardShare(0, num_places, self._board_path)
        self._core = AsyncMPClient(self._vllm_config, self._executor_class, self._log_stats, share)
        try:
            # They import what they need while the core starts.
            for place, sock in enumerate(self._sockets):
                self._processes[place] = _ApiProcess(place, sock)
            self._core.wait_ready()
            refuse_other_servers(self._args)
            self._tallies = Tallies(str(directory / "tallies"), num_places)
            self._metrics = JointMetrics(self._core.configs, self._ports, self._log_stats)
            self._sleep = JointSleep(self._core, self._ports, self._metrics)
            self._placement = JointPlacement(
                self._core, self._ports, self._metrics, self._vllm_config
            )
            loop = asyncio.get_running_loop()
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._take_signal, number)
            for process in self._processes.values():
                self._introduce(process)
            self._spawn_task(self._follow_core())
            self._spawn_task(self._log_throughput())
            self._spawn_task(self._listen())
            await self._all_gone.wait()
            return self._exit_code
        finally:
            for task in self._tasks:
                task.cancel()
            self._core.shutdown()

    def _introduce(self, process: _ApiProcess) -> None:
        """Tell a process what to serve, and the core of it."""
        process.client_index = next(self._indices)
        for link in self._core.links:
            link.attach(process.client_index)
        setup = ApiSetup(
            self._vllm_config,
            self._args,
            self._log_stats,
            process.place,
            len(self._sockets),
            process.client_index,
            tuple(
                RunningCore(config, link.directory)
                for config, link in zip(self._core.configs, self._core.links, strict=True)
            ),
            self._tallies.path,
            self._board_path,
            self._sleep.state,
        )
        loop = asyncio.get_running_loop()
        loop.add_reader(process.process.sentinel, self._take_end, process)
        with contextlib.suppress(OSError):  # it died: its end is noticed
            process.pipe.send_bytes(pickle_setup(setup))
        process.port = ControlPort(process.pipe, self._handlers(process))

    def _handlers(self, process: _ApiProcess) -> Handlers:
        """What a process may ask for."""

        async def ready() -> JointState:
            process.is_ready = True
            self._failed_starts = 0
            return JointState(self._sleep.state, self._placement.placed)

        async def abort(reply_ids: list[str]) -> None:
            await tell_all(self._ports(), "abort", reply_ids)

        return {
            "ready": ready,
            "abort": abort,
            "metrics_text": self._metrics.text,
            "sleep": self._sleep.sleep,
            "wake_up": self._sleep.wake_up,
            "overlap_placement": self._placement.overlap,
        }

    def _ports(self) -> dict[int, ControlPort]:
        """Of the processes that serve."""
        return {
            place: process.port
            for place, process in self._processes.items()
            if process.port is not None and process.is_ready
        }

    def _spawn_task(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- while serving -------------------------------------------------------------------------

    async def _follow_core(self) -> None:
        while True:
            for outputs in await self._core.get_outputs():
                if isinstance(outputs, EngineCoreOutputs):
                    self._metrics.record(outputs.scheduler_stats, outputs.engine_index)
                else:
                    await self._take_core_death(outputs)
                    return

    async def _take_core_death(self, error: EngineDeadError) -> None:
        logger.error("the engine died: %s", error)
        self._exit_code = 1
        for process in self._processes.values():
            if process.port is not None:
                self._spawn_task(_tell(process.port, "lose_core", error.cause or "it died"))
        if envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH and self._processes:
            return
        # They end by themselves when their requests have had the error.
        self._stopping = True
        if not self._processes:
            self._all_gone.set()
        self._spawn_task(self._kill_later(_GRACE_S))

    async def _listen(self) -> None:
        """End processes that hang, as if they had died."""
        while True:
            await asyncio.sleep(BEAT_S)
            for place, process in self._processes.items():
                if (hang := process.listen()) is not None:
                    logger.error("API process %d %s; it is ended", place, hang)
                    process.process.kill()

    async def _log_throughput(self) -> None:
        while True:
            await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
            await self._metrics.log()

    def _take_end(self, process: _ApiProcess) -> None:
        """A process has ended, whoever wanted that."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.process.sentinel)
        process.process.join()
        if process.port is not None:
            process.port.close()
        place = process.place
        del self._processes[place]
        if self._core.dead is not None:
            self._exit_code = 1  # also where `_follow_core` has not heard of it yet
        if self._stopping or self._core.dead is not None:
            if not self._args.uds:
                # What connects goes to the processes that are left, not to where nobody accepts.
                self._sockets[place].close()
            if not self._processes:
                self._all_gone.set()
            return
        self._tallies.clear(place)
        self._metrics.lose(place)
        if self._core.router is not None:
            self._core.router.lose(place)
        for link in self._core.links:
            with contextlib.suppress(EngineDeadError):  # `_follow_core` is about to hear of it
                link.detach(process.client_index)
        self._failed_starts += not process.is_ready
        code = process.process.exitcode
        logger.error("API process %d died (exit code %s); its requests are lost", place, code)
        if self._args.api_server_death == "stop" or self._failed_starts >= _MOST_FAILED_STARTS:
            self._exit_code = 1
            self._stop()
            return
        logger.info("another process takes the place of API process %d", place)
        try:
            self._processes[place] = _ApiProcess(place, self._sockets[place])
            self._introduce(self._processes[place])
        except ForkError as error:
            logger.error("there cannot be another: %s", error)
            self._exit_code = 1
            self._stop()
        except EngineDeadError:
            self._processes.pop(place).kill()

    # ---- the end -------------------------------------------------------------------------------

    def _take_signal(self, number: int) -> None:
        note_stop()
        name = signal.Signals(number).name
        if self._stopping:
            logger.warning("%s again: exiting at once", name)
            for process in self._processes.values():
                process.process.kill()
            with contextlib.suppress(Exception):
                self._core.shutdown(timeout=0)
            remove_directory(self._directory)
            remove_own_files()
            os._exit(_EXIT_FORCED)
        logger.info("%s: finishing running requests, no new ones", name)
        self._stop()

    def _stop(self) -> None:
        """Let all processes finish what runs."""
        self._stopping = True
        if not self._processes:
            self._all_gone.set()
        for process in self._processes.values():
            if not process.is_ready:
                process.process.kill()
            elif process.port is not None:
                self._spawn_task(_tell(process.port, "stop"))
        self._spawn_task(self._kill_later(self._args.shutdown_timeout + _GRACE_S))

    async def _kill_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        for process in self._processes.values():
            logger.error("API process %d does not end and is killed", process.place)
            process.process.kill()


async def _tell(port: ControlPort, name: str, *args: Any) -> None:
    """Call a process, and wait until it has done so or has ended."""
    with contextlib.suppress(PeerGoneError):
        await port.call(name, *args)
