# SPDX-License-Identifier: Apache-2.0
"""What the supervisor of API processes does, without processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.entrypoints.api_processes import supervisor as supervisor_module
from vllm.entrypoints.api_processes.supervisor import Supervisor, _ApiProcess
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.utils import silence
from vllm.utils.silence import Silence
from vllm.v1.engine.exceptions import EngineDeadError


@pytest.mark.asyncio
@pytest.mark.parametrize(("dead", "expected"), [(EngineDeadError("killed"), 1), (None, 0)])
async def test_the_status_is_of_an_engine_that_died_though_its_end_is_heard_later(
    dead: EngineDeadError | None, expected: int
) -> None:
    """The last API process may end before the outputs of the engine do."""
    reading, writing = os.pipe()
    process: Any = SimpleNamespace(
        place=0, port=None, process=SimpleNamespace(sentinel=reading, join=lambda: None)
    )
    sock = socket.socket()
    supervisor = Supervisor([sock], FrontEndArgs(), None, None, False)  # type: ignore[arg-type]
    supervisor._core = SimpleNamespace(dead=dead)  # type: ignore[assignment]
    supervisor._processes = {0: process}
    supervisor._all_gone = asyncio.Event()
    supervisor._stopping = dead is None
    asyncio.get_running_loop().add_reader(reading, supervisor._take_end, process)
    os.close(writing)
    await asyncio.wait_for(supervisor._all_gone.wait(), 60)
    os.close(reading)
    assert sock.fileno() == -1, "nobody accepts what it would go on to take"
    assert supervisor._exit_code == expected


class Port:
    """Of a process that takes calls and answers none."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def call(self, name: str, *args: Any) -> None:
        self.calls.append(name)
        await asyncio.Event().wait()


def supervisor_of(*processes: Any) -> Supervisor:
    supervisor = Supervisor([], FrontEndArgs(), None, None, False)  # type: ignore[arg-type]
    supervisor._processes = dict(enumerate(processes))
    supervisor._all_gone = asyncio.Event()
    return supervisor


@pytest.mark.asyncio
async def test_a_process_that_does_not_answer_keeps_no_other_from_hearing_of_the_end() -> None:
    ports = [Port(), Port()]
    supervisor = supervisor_of(*(SimpleNamespace(port=port) for port in ports))
    await asyncio.wait_for(supervisor._take_core_death(EngineDeadError("killed")), 10)
    await asyncio.sleep(0)
    assert [port.calls for port in ports] == [["lose_core"]] * 2
    for task in supervisor._tasks:
        task.cancel()


@pytest.mark.asyncio
async def test_a_process_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that answers is not, and neither is one that starts."""
    monkeypatch.setattr(silence, "LIMIT_S", 0.4)
    monkeypatch.setattr(silence, "SILENT_S", 0.1)
    monkeypatch.setattr(supervisor_module, "BEAT_S", 0.05)
    children = [start_child() for _ in range(3)]
    hangs, answers, starts = (api_process(child, place) for place, child in enumerate(children))
    hangs.port, hangs.is_ready = Port(), True
    answers.port, answers.is_ready = SimpleNamespace(call=answer), True
    supervisor = supervisor_of(hangs, answers, starts)
    listening = asyncio.create_task(supervisor._listen())
    try:
        await asyncio.wait_for(asyncio.to_thread(children[0].join), 30)
        await asyncio.sleep(0.5)
        assert [child.is_alive() for child in children] == [False, True, True]
    finally:
        listening.cancel()
        for child in children:
            child.kill()
    assert "API process 0 says nothing and does nothing for 0.4 s" in caplog.text


async def answer(name: str) -> None:
    return


def start_child() -> multiprocessing.process.BaseProcess:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    child.start()
    return child


def api_process(child: multiprocessing.process.BaseProcess, place: int) -> Any:
    made = _ApiProcess.__new__(_ApiProcess)
    made.place, made.process, made.port, made.is_ready = place, child, None, False
    made._silence, made._asking = Silence(child.pid or 0), None
    return made
