# SPDX-License-Identifier: Apache-2.0
"""A short completion of the trained checkpoint comes back fast enough to work with."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.remote_server import RemoteServer

pytestmark = pytest.mark.e2e

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen3_5-code"
LIMIT_S = 1.0


def test_sixteen_tokens_in_under_a_second() -> None:
    """Also the first one: a server that reports healthy has nothing left to warm up."""
    with RemoteServer(TRAINED, "--served-model-name", "trained") as server:
        seconds = []
        for attempt in range(5):
            started = time.monotonic()
            reply = server.post(
                "/v1/completions",
                model="trained",
                prompt=f"def read_lines_{attempt}(path):\n    with open(path) as f:\n",
                max_tokens=16,
                temperature=0,
                ignore_eos=True,
            )
            seconds.append(time.monotonic() - started)
            assert reply["usage"]["completion_tokens"] == 16
    print("seconds:", *(f"{s:.3f}" for s in seconds))
    assert max(seconds) < LIMIT_S, seconds
