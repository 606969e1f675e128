# SPDX-License-Identifier: Apache-2.0
"""What the supervisor of API processes does, without processes."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.entrypoints.api_processes.supervisor import Supervisor
from vllm.entrypoints.openai.cli_args import FrontEndArgs
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
