# SPDX-License-Identifier: Apache-2.0
"""An API process: a front end without an engine core of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import os
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.api_processes.control import ControlPort, Handlers
from vllm.entrypoints.openai.siblings import Siblings, abort_replies
from vllm.utils import startup_phases
from vllm.utils.imports import gc_paused
from vllm.utils.parent_watch import watch_parent
from vllm.v1.engine.placements import PlacementChange
from vllm.v1.engine.sleep import SleepState, check_mode, check_sleep, check_tags
from vllm.v1.serial_utils import unpickle_setup

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vllm.config import VllmConfig
    from vllm.entrypoints.openai.cli_args import FrontEndArgs
    from vllm.model_executor.placements import Placement
    from vllm.v1.engine.async_client import AttachedClient
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_link import RunningCore

#: how long a process that has lost its supervisor may take to stop
_ORPHAN_GRACE_S = 10.0
#: what takes an API process long to import
APPLICATION = ("vllm.v1.engine.async_llm", "vllm.entrypoints.openai.api_server")


@dataclass(frozen=True)
class ApiSetup:
    """What a supervisor tells an API process at its start.

    `place`: the process's number among those that serve at the same time, from 0; whoever
    replaces it has the same. `client_index`: its number among all clients the core ever has."""

    vllm_config: VllmConfig
    args: FrontEndArgs
    log_stats: bool
    place: int
    num_places: int
    client_index: int
    #: one per replica
    cores: tuple[RunningCore, ...]
    tally_path: str | None
    #: where the processes share what they know of several replicas
    board_path: str | None
    sleep: SleepState


@dataclass(frozen=True)
class JointState:
    """What all processes know alike. `placed`: the last change of the placement, if any."""

    sleep: SleepState
    placed: tuple[Placement, PlacementChange] | None = None


class ServedTogether(Siblings):
    """This process and those that the supervisor knows."""

    def __init__(self, engine: AsyncLLM, port: ControlPort) -> None:
        self._engine = engine
        self._port = port

    async def abort(self, reply_ids: list[str]) -> None:
        await self._port.call("abort", reply_ids)

    async def metrics_text(self) -> bytes:
        return await self._port.call("metrics_text")

    async def sleep(self, level: int, mode: str) -> None:
        check_sleep(self._engine.vllm_config, level)
        check_mode(mode)
        await self._port.call("sleep", level, mode)

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        await self._port.call("wake_up", check_tags(tags))

    async def change_placement(self, placement: Placement, mode: str) -> None:
        chosen = self._engine.rest.placement_to_use(placement, mode)
        await self._port.call("overlap_placement", chosen)


class CommandedEngine:
    """What the supervisor may ask of this process."""

    def __init__(self, engine: AsyncLLM, client: AttachedClient) -> None:
        self._engine = engine
        self._client = client
        self._rest: contextlib.AbstractAsyncContextManager[None] | None = None
        self._finish: Callable[[], None] | None = None

    def take_stop(self, finish: Callable[[], None]) -> None:
        """From now on the server can be told to end."""
        self._finish = finish

    async def begin(self, port: ControlPort) -> None:
        """The server is ready: from now on this process hears of every sleep, wake-up and change of
        the placement, and now of those during its start."""
        state: JointState = await port.call("ready")
        self._engine.front_end.adopt_sleep(state.sleep)
        if state.placed is not None:
            await self.placed(*state.placed)

    def handlers(self) -> Handlers:
        """All of it, by name."""
        own = (
            *(self.abort, self.metrics, self.rest, self.go_on, self.slept),
            *(self.call_off, self.woke_up, self.placed, self.lose_core, self.stop),
            self.say_something,
        )
        return {handler.__name__: handler for handler in own}

    async def abort(self, reply_ids: list[str]) -> None:
        """End the requests of these replies that run here."""
        await abort_replies(self._engine, reply_ids)

    async def metrics(self) -> list[Any]:
        """What is known here."""
        return self._engine.metrics_snapshot()

    async def rest(self, mode: str) -> None:
        """Come to rest, and stay so until `slept` or `go_on`."""
        await self.go_on()
        rest = self._engine.rest.resting(mode)
        await rest.__aenter__()
        self._rest = rest

    async def go_on(self) -> None:
        """There is no sleep after all."""
        rest, self._rest = self._rest, None
        if rest is not None:
            await rest.__aexit__(None, None, None)

    async def slept(self, level: int) -> None:
        """The core sleeps."""
        self._engine.front_end.note_sleep(level)
        await self.go_on()

    async def call_off(self) -> None:
        """Whoever waits to sleep need not any more."""
        self._engine.front_end.sleep.call_off()

    async def woke_up(self, tags: tuple[str, ...]) -> None:
        """These parts of the core are awake."""
        self._engine.front_end.note_wake_up(tags)

    async def placed(self, placement: Placement, change: PlacementChange) -> None:
        """Requests that do not choose have another placement."""
        self._engine.front_end.show_placement(placement, change)

    async def lose_core(self, cause: str) -> None:
        """The core has died."""
        for link in self._client.links:
            link.lose(cause)

    async def say_something(self) -> None:
        """The answer is that this process goes on."""

    async def stop(self) -> None:
        """Finish what runs, then end."""
        if self._finish is not None:
            self._finish()


def run_api_process(pipe: Connection, sock: socket.socket) -> None:
    """Entry point: imports what is needed, then waits at `pipe` for an `ApiSetup` and serves on
    `sock`. Ends when told to, when the core dies, or when the parent is gone."""
    from vllm.entrypoints.access_log import set_up_logging
    from vllm.entrypoints.launcher import run_server_loop, stop_start_at_signals
    from vllm.entrypoints.tally import Tallies

    parent = watch_parent(_ORPHAN_GRACE_S)
    startup_phases.take_events()  # a forked process begins with a copy of its parent's
    with gc_paused():
        for module in APPLICATION:
            importlib.import_module(module)
    try:
        setup: ApiSetup = unpickle_setup(pipe.recv_bytes())
    except EOFError:  # the start has failed elsewhere
        return
    if setup.tally_path is not None:
        parent.leftovers.append(os.path.dirname(setup.tally_path))
    args = dataclasses.replace(setup.args)  # its checks import what plug-ins bring
    set_up_logging(args)
    stop_start_at_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tallies = Tallies(setup.tally_path, setup.num_places, setup.place)
    made: list[ControlPort] = []
    commands: list[CommandedEngine] = []
    telling: list[asyncio.Task[None]] = []

    def make_engine() -> AsyncLLM:
        from vllm.v1.engine.async_client import AttachedClient
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.replica_board import BoardShare

        share = BoardShare(setup.place, setup.num_places, setup.board_path)
        client = AttachedClient(setup.vllm_config, setup.cores, setup.client_index, share)
        engine = AsyncLLM(setup.vllm_config, log_stats=setup.log_stats, client=client)
        engine.front_end.adopt_sleep(setup.sleep)
        commands.append(CommandedEngine(engine, client))
        made.append(ControlPort(pipe, commands[0].handlers()))
        return engine

    def make_app(engine: AsyncLLM) -> FastAPI:
        from vllm.entrypoints.openai.api_server import build_app

        (port,) = made
        return build_app(engine, args, ServedTogether(engine, port), tallies)

    def take_stop(finish: Callable[[], None]) -> None:
        commands[0].take_stop(finish)
        telling.append(asyncio.get_running_loop().create_task(commands[0].begin(made[0])))

    raise SystemExit(run_server_loop(sock, args, make_engine, make_app, tallies, take_stop))
