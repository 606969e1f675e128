# SPDX-License-Identifier: Apache-2.0
"""Many streaming clients, a third of which leave at random; then the engine's sudden death.

`python -m benchmarks.client_storm` is the same with 2,000 clients. The engine core, its scheduler
and its state memory are the real ones; the model is replaced by one that costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.api_overhead import request_bytes
from benchmarks.client_storm import leftovers, run_storm, run_storm_processes, settle
from benchmarks.served_process import TokenServer
from tests.forked_servers import forked_servers

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

#: more than the 64 that run at once, so that clients leave queues too
NUM_CLIENTS = 240
#: from the end of the engine's process to the end of the last stream; milliseconds in fact
DEATH_LIMIT_S = 5


@pytest.fixture(scope="module")
def server() -> Iterator[TokenServer]:
    with forked_servers(), TokenServer("--step-ms", "5", "--max-num-seqs", "64") as running:
        yield running


def test_nothing_is_left_of_clients_that_left(server: TokenServer) -> None:
    asyncio.run(run_storm(server.port, 8, 4, seed=0))
    num_files = server.process.num_fds()
    storm = asyncio.run(run_storm(server.port, NUM_CLIENTS, 40, seed=1))
    assert storm.num_left == NUM_CLIENTS // 3 and storm.num_broken == 0
    assert settle(server, num_files) == {}


def test_a_storm_from_several_processes(server: TokenServer) -> None:
    storm, clients = run_storm_processes(server.port, 60, 10, seed=1, num_processes=3)
    assert (storm.num_complete, storm.num_left, storm.num_broken) == (40, 20, 0)
    assert len(clients) == 3 and all(client.cpu_s > 0 for client in clients)


def test_leftovers_are_seen(server: TokenServer) -> None:
    """The check above can fail: a stream in progress shows up under every name."""

    async def main() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        num_files = server.process.num_fds()
        writer.write(request_bytes(3000, chat=False))
        await reader.readuntil(b"data: ")
        found: dict[str, float] = {}

        async def look() -> None:
            while len(found) < 3:
                found.update(await asyncio.to_thread(leftovers, server, num_files - 1))
                await reader.read(1 << 16)

        await asyncio.wait_for(look(), 60)
        writer.transport.abort()
        assert {"requests in progress", "open files", "vllm:num_requests_running"} <= set(found)

    asyncio.run(main())


async def last_event(port: int, request: bytes, begun: list[int]) -> dict:
    """The last event before `[DONE]`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await reader.readuntil(b"data: {")
    begun.append(1)
    rest = await reader.readuntil(b"data: [DONE]\n\n")
    writer.close()
    return json.loads(rest.split(b"data: ")[-2].partition(b"\n\n")[0])


def test_a_killed_engine_ends_every_stream_with_an_error(server: TokenServer) -> None:
    """Leaves the server dead: the last test of this module."""

    def ended(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    async def main() -> list[dict]:
        begun: list[int] = []
        request = request_bytes(3000, chat=False)
        port = server.port
        streams = [asyncio.ensure_future(last_event(port, request, begun)) for _ in range(40)]
        while len(begun) < len(streams):
            await asyncio.sleep(0.02)
        children = server.process.children()
        assert children
        for core in children:
            core.kill()
        while not all(map(ended, children)):
            await asyncio.sleep(0.01)
        died = time.monotonic()
        events = await asyncio.wait_for(asyncio.gather(*streams), 60)
        assert time.monotonic() - died < DEATH_LIMIT_S
        return events

    for event in asyncio.run(main()):
        assert event["error"]["code"] == 500 and "dead" in event["error"]["message"]
    assert server.wait(60) == 1
