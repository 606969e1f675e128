# SPDX-License-Identifier: Apache-2.0
"""Many streaming clients at once, a third of which leave at a random moment; then: what is left?

    python -m benchmarks.client_storm [--clients 2000] [--tokens 40] [--client-processes N]

The clients are spread over processes, by default one per 500 clients on up to half of the cores;
the result says how busy the busiest was. The server is real but for its model (see `token_source`):
what a lost request would hold, an entry of the scheduler, a block of state memory, a socket, is
held here too. Exit status 1 if anything is left, or if a client that stayed did not get all of its
tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import re
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import httpx

from benchmarks.api_overhead import request_bytes
from benchmarks.served_process import TokenServer
from vllm.benchmarks.client_usage import ClientUsage, UsageClock
from vllm.benchmarks.load import allow_many_connections
from vllm.benchmarks.processes import num_usable_cores

_SETTLE_S = 60.0
#: bytes that a piece may have of the event that ends a stream
_LAST_EVENT = len(b"data: [DONE]")
#: connections that an event loop opens and reads within about a second
_CLIENTS_PER_PROCESS = 500
#: gauges of `/metrics` that must be back at zero
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class Storm:
    """How many clients stayed to the end and got everything, and how many left early."""

    num_complete: int
    num_left: int
    num_broken: int


async def stay(port: int, request: bytes, num_tokens: int, opened: asyncio.Semaphore) -> bool:
    """Whether the whole stream came: at least one event, no error, `[DONE]`."""
    reader, writer = await connect(port, opened)
    try:
        writer.write(request)
        data = bytearray()
        while not data.endswith(b"data: [DONE]\n\n\r\n") and b"[DONE]" not in data[-32:]:
            piece = await reader.read(1 << 16)
            if not piece:
                return False
            data += piece
        found = re.findall(rb'"token_ids":\[([^\]]*)\]', bytes(data))
        return sum(len(ids.split(b",")) for ids in found if ids) == num_tokens
    finally:
        writer.close()


async def leave(port: int, request: bytes, opened: asyncio.Semaphore, rng: random.Random) -> None:
    """Go away before, between or after any of the events."""
    reader, writer = await connect(port, opened)
    writer.write(request)
    last = b""
    for _ in range(rng.choice([0, 0, 1, 2, 5, 20])):
        piece = await reader.read(1 << 10)
        last = last[-_LAST_EVENT:] + piece
        # The server closes a connection that nobody uses, seconds after the last event.
        if not piece or b"data: [DONE]" in last:
            break
    if rng.random() < 0.5:
        await asyncio.sleep(rng.random() * 0.5)
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


async def connect(
    port: int, opened: asyncio.Semaphore
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """One at a time for as long as the handshake lasts: the backlog of a socket is bounded."""
    async with opened:
        return await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)


async def run_storm(port: int, num_clients: int, num_tokens: int, seed: int) -> Storm:
    """All clients at once; every third one leaves."""
    rng = random.Random(seed)
    opened = asyncio.Semaphore(64)
    request = request_bytes(num_tokens, chat=False, return_token_ids=True)
    leaving = [leave(port, request, opened, rng) for _ in range(num_clients // 3)]
    staying = [
        stay(port, request, num_tokens, opened) for _ in range(num_clients - num_clients // 3)
    ]
    tasks = [asyncio.ensure_future(visit) for visit in [*leaving, *staying]]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    stayed = results[len(leaving) :]
    num_complete = sum(result is True for result in stayed)
    return Storm(num_complete, len(leaving), len(stayed) - num_complete)


def shares(num_clients: int, num_processes: int) -> list[int]:
    """Clients of each process, in multiples of three where possible: every third one leaves."""
    threes, rest = divmod(num_clients, 3)
    per, more = divmod(threes, num_processes)
    counts = [3 * (per + (number < more)) for number in range(num_processes)]
    counts[-1] += rest
    return counts


def choose_num_processes(num_clients: int, num_cores: int) -> int:
    """One per 500 clients; half of the cores are the server's."""
    return max(1, min(math.ceil(num_clients / _CLIENTS_PER_PROCESS), num_cores // 2))


def storm_share(
    result: Connection, ready: Barrier, port: int, num_clients: int, num_tokens: int, seed: int
) -> None:
    """A client process: its share of the storm once all are `ready`; sends what came of it."""
    allow_many_connections()
    ready.wait()
    clock = UsageClock()
    storm = asyncio.run(run_storm(port, num_clients, num_tokens, seed))
    result.send((storm, clock.usage()))


def run_storm_processes(
    port: int, num_clients: int, num_tokens: int, seed: int, num_processes: int
) -> tuple[Storm, list[ClientUsage]]:
    """`run_storm` from several processes at once; each draws from a seed of its own."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Barrier(num_processes)
    processes, results = [], []
    for number, count in enumerate(shares(num_clients, num_processes)):
        receiver, sender = spawn.Pipe(duplex=False)
        args = (sender, ready, port, count, num_tokens, seed + number)
        process = spawn.Process(target=storm_share, args=args, daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        results.append(receiver)
    reports: list[tuple[Storm, ClientUsage]] = [receiver.recv() for receiver in results]
    for process in processes:
        process.join()
    whole = Storm(
        sum(storm.num_complete for storm, _ in reports),
        sum(storm.num_left for storm, _ in reports),
        sum(storm.num_broken for storm, _ in reports),
    )
    return whole, [usage for _, usage in reports]


def leftovers(server: TokenServer, num_files: int) -> dict[str, float]:
    """What the server still holds, by name; empty when all is as before."""
    url = f"http://127.0.0.1:{server.port}"
    found: dict[str, float] = {}
    with httpx.Client() as client:
        text = client.get(url + "/metrics").text
        found["requests in progress"] = client.get(url + "/load").json()["server_load"]
    for name in _GAUGES:
        values = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
        assert values, f"{name} is not among the metrics"
        found[name] = sum(map(float, values))
    found["open files"] = server.process.num_fds() - num_files
    return {name: value for name, value in found.items() if value > 0}


def settle(server: TokenServer, num_files: int) -> dict[str, float]:
    """`leftovers`, once they are gone or have had their time to go."""
    deadline = time.monotonic() + _SETTLE_S
    while (left := leftovers(server, num_files)) and time.monotonic() < deadline:
        # The gauges change with the engine's steps, and an idle engine makes none.
        asyncio.run(run_storm(server.port, 1, 1, 0))
        time.sleep(0.2)
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--client-processes", type=int)
    options = parser.parse_args()
    num_processes = options.client_processes or choose_num_processes(
        options.clients, num_usable_cores()
    )
    with TokenServer("--step-ms", "5") as server:
        asyncio.run(run_storm(server.port, 8, 4, options.seed))
        time.sleep(1)
        num_files = server.process.num_fds()
        began = time.monotonic()
        storm, clients = run_storm_processes(
            server.port, options.clients, options.tokens, options.seed + 1, num_processes
        )
        seconds = time.monotonic() - began
        left = settle(server, num_files)
    busy = round(max(client.busy for client in clients), 2)
    result = {**vars(storm), "seconds": round(seconds, 1), "left": left}
    print(
        json.dumps({**result, "client_processes": num_processes, "client_max_busy": busy}, indent=2)
    )
    return 1 if left or storm.num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
