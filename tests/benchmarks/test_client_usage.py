# SPDX-License-Identifier: Apache-2.0
"""When a result is the clients' rather than the server's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.benchmarks.scripted_server import END, HEAD, ScriptedServer, chunk, events, text, usage
from tests.benchmarks.test_load_processes import load
from vllm.benchmarks import client_usage
from vllm.benchmarks.client_usage import (
    ClientUsage,
    UsageClock,
    client_limited,
    limited_warning,
    usage_figures,
)

IDLE = ClientUsage(cpu_s=1.0, ready_s=0.5, wall_s=10.0)
BUSY = ClientUsage(cpu_s=9.0, ready_s=None, wall_s=10.0)
STARVED = ClientUsage(cpu_s=3.0, ready_s=6.0, wall_s=10.0)


def test_busy_is_having_work() -> None:
    assert (IDLE.busy, BUSY.busy, STARVED.busy) == (0.15, 0.9, 0.9)
    assert ClientUsage(0.0, None, 0.0).busy == 0.0


def test_one_busy_process_is_enough() -> None:
    assert not client_limited([IDLE, IDLE])
    assert client_limited([IDLE, BUSY]) and client_limited([STARVED, IDLE])
    edge = ClientUsage(cpu_s=8.0, ready_s=0.0, wall_s=10.0)
    assert not client_limited([edge])


def test_figures() -> None:
    assert usage_figures([IDLE, STARVED], 1000) == {
        "client_processes": 2,
        "client_cpu_s": [1.0, 3.0],
        "client_ready_s": [0.5, 6.0],
        "client_wall_s": [10.0, 10.0],
        "client_max_busy": 0.9,
        "client_cpu_us_per_token": 4000.0,
        "client_limited": True,
    }
    assert usage_figures([IDLE], 0)["client_cpu_us_per_token"] is None
    assert "90%" in limited_warning([IDLE, BUSY])


def test_the_clock_counts_work_and_not_sleep() -> None:
    clock = UsageClock()
    time.sleep(0.2)
    slept = clock.usage()
    while time.process_time() - clock._cpu_s < 0.2:
        pass
    worked = clock.usage()
    assert slept.cpu_s < 0.1 and slept.wall_s >= 0.2
    assert worked.cpu_s >= 0.2 and worked.wall_s >= slept.wall_s + 0.1
    assert worked.busy > slept.busy


def test_waiting_for_a_core_is_read_from_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "schedstat"
    path.write_text("5000000000 1000000000 7\n")
    monkeypatch.setattr(client_usage, "_SCHEDSTAT", path)
    clock = UsageClock()
    path.write_text("6000000000 3500000000 9\n")
    assert clock.usage().ready_s == 2.5
    path.unlink()
    assert clock.usage().ready_s is None and UsageClock().usage().ready_s is None


def test_an_idle_client_is_seen_to_be_idle() -> None:
    """Waiting for a slow server is no work; a flood of tokens is."""
    slow = [(0.0, HEAD), (1.0, chunk(events(text("a"), usage(1, 1))) + END)]
    flood = [(0.0, HEAD), *[(0.0, chunk(events(text("a"))) * 2000)] * 60, (0.0, END)]
    with ScriptedServer({"": slow}) as server:
        [idle] = load(server.url, ["a"], num_processes=1).clients
    with ScriptedServer({"": flood}) as server:
        result = load(server.url, ["a"] * 2, num_processes=2)
    assert idle.cpu_s < 0.1 * idle.wall_s
    assert [outcome.output_len for outcome in result.outcomes] == [120_000] * 2
    assert min(client.cpu_s for client in result.clients) > 2 * idle.cpu_s
