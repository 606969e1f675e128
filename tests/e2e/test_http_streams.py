# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.http_streams` with real servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import http_streams
from tests.forked_servers import forked_servers

pytestmark = pytest.mark.e2e

Run = Callable[..., tuple[str, list[dict]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*words)`: what it prints, and the points of its file."""

    def run_here(*words: str) -> tuple[str, list[dict]]:
        path = tmp_path / "r.json"
        with forked_servers():
            # 3: other tests keep the machine busy, which is not what is tested.
            assert http_streams.main(["--json", str(path), *words]) in (0, 3)
        shown, points = capsys.readouterr().out, json.loads(path.read_text())["points"]
        assert [p["client_limited"] for p in points].count(True) == shown.count("NOT A RESULT")
        return shown, points

    return run_here


def test_a_free_model(run: Run) -> None:
    shown, points = run(
        *["--streams", "1,6", "--rounds", "6", "--prompt", "20", "--output", "16", "--chat"],
        *["--step-ms", "10", "--client-processes", "2"],
    )
    assert [(p["streams"], p["requests"], p["output_tokens"]) for p in points] == [
        (1, 6, 96),
        (6, 36, 576),
    ]
    assert [p["client_processes"] for p in points] == [1, 2]
    for p in points:
        # A step of 10 ms, and a token in each.
        assert p["itl_p50_ms"] > 9 and p["seconds"] > 6 * 16 * 0.01
        assert p["tokens_per_s"] == pytest.approx(p["output_tokens"] / p["seconds"])
        assert 0 < p["ttft_p50_ms"] <= p["ttft_p99_ms"] and p["ratio"] is None
        assert min(p["api_us"], p["engine_us"], p["client_us"]) > 0 and p["api_processes"] == 1
    assert "| 6 |" in shown.splitlines()[-1]


@pytest.mark.slow
def test_a_model_beside_itself_without_http(run: Run) -> None:
    shown, [point] = run(
        *["--model", "examples/models/tiny-qwen3_5-code", "--streams", "2", "--prompt", "20"],
        *["--output", "8", "max_model_len=256", "max_num_seqs=4", 'dtype="float32"'],
        *["enforce_eager=true", "kv_cache_memory_bytes=64000000"],
    )
    assert point["output_tokens"] == 16 and point["offline_tokens_per_s"] > 0
    assert point["offline_first_ms"] > 0
    assert point["ratio"] == pytest.approx(point["tokens_per_s"] / point["offline_tokens_per_s"])
    assert "HTTP / offline" in shown
