# SPDX-License-Identifier: Apache-2.0
"""A short completion of the trained checkpoint comes back fast enough to work with."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.remote_server import RemoteServer

pytestmark = pytest.mark.e2e

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen3_5-code"
LIMIT_S = 1.0


def cpu_seconds(server: RemoteServer) -> float:
    """CPU time of the server's processes so far."""
    times = [p.cpu_times() for p in [psutil.Process(server.process.pid), *server.children()]]
    return sum(t.user + t.system for t in times)


def test_sixteen_tokens_in_under_a_second() -> None:
    """Also the first one: a server that reports healthy has nothing left to warm up.

    On a loaded machine single requests may take longer: what counts is the best time, and for each
    request the work the server does.
    """
    with RemoteServer(TRAINED, "--served-model-name", "trained") as server:
        seconds, work = [], []
        for attempt in range(5):
            started, worked = time.monotonic(), cpu_seconds(server)
            reply = server.post(
                "/v1/completions",
                model="trained",
                prompt=f"def read_lines_{attempt}(path):\n    with open(path) as f:\n",
                max_tokens=16,
                temperature=0,
                ignore_eos=True,
            )
            seconds.append(time.monotonic() - started)
            work.append(cpu_seconds(server) - worked)
            assert reply["usage"]["completion_tokens"] == 16
    print("seconds:", *(f"{s:.3f}" for s in seconds), "of work:", *(f"{s:.3f}" for s in work))
    assert min(seconds) < LIMIT_S, seconds
    assert max(work) < LIMIT_S, work
