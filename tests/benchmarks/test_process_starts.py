# SPDX-License-Identifier: Apache-2.0
"""Starts of servers with several processes: which ones count, and when a server serves."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import pytest

from benchmarks.process_starts import measure, num_listening, rows


def run(flags: str, method: str, wall_s: float) -> dict[str, Any]:
    return {"flags": flags, "method": method, "wall_s": wall_s, "cpu_s": 2.0, "bytes": 3e8}


def test_the_shortest_start_of_each_server_is_shown() -> None:
    runs = [run("", "as it is", 5.0), run("", "as it is", 4.0), run("", "spawned", 9.0),
            run("-dp 2", "as it is", 6.0), run("-dp 2", "spawned", 7.0),
            run("", "spawned", 8.0)]  # fmt: skip
    assert rows(runs).splitlines()[2:] == [
        "| no flag | 4.0 | 2.0 | 300 MB | 8.0 | 2.0 | 300 MB |",
        "| `-dp 2` | 6.0 | 2.0 | 300 MB | 7.0 | 2.0 | 300 MB |",
    ]


@pytest.mark.slow
def test_a_start_is_measured() -> None:
    found = measure("--api-server-count 2", 2, "as it is")
    assert 0.5 < found["cpu_s"] < 2 * found["wall_s"] * (os.cpu_count() or 1)
    assert 1e8 < found["bytes"] < 2e9


def test_a_socket_that_is_only_bound_does_not_serve() -> None:
    own = psutil.Process()
    before = num_listening(own)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        assert num_listening(own) == before
        one.listen()
        assert num_listening(own) == before + 1
