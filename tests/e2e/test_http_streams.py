# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.http_streams` with real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_python import run_python

pytestmark = pytest.mark.e2e


def run(path: Path, *words: str) -> tuple[str, list[dict]]:
    done = run_python("benchmarks.http_streams", "--json", str(path), *words)
    # 3: other tests keep the machine busy, which is not what is tested.
    assert done.returncode in (0, 3), done.stderr
    points = json.loads(path.read_text())["points"]
    assert [p["client_limited"] for p in points].count(True) == done.stdout.count("NOT A RESULT")
    return done.stdout, points


def test_a_free_model(tmp_path: Path) -> None:
    shown, points = run(
        tmp_path / "r.json",
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
def test_a_model_beside_itself_without_http(tmp_path: Path) -> None:
    shown, [point] = run(
        tmp_path / "r.json",
        *["--model", "examples/models/tiny-qwen3_5-code", "--streams", "2", "--prompt", "20"],
        *["--output", "8", "max_model_len=256", "max_num_seqs=4", 'dtype="float32"'],
        *["enforce_eager=true", "kv_cache_memory_bytes=64000000"],
    )
    assert point["output_tokens"] == 16 and point["offline_tokens_per_s"] > 0
    assert point["offline_first_ms"] > 0
    assert point["ratio"] == pytest.approx(point["tokens_per_s"] / point["offline_tokens_per_s"])
    assert "HTTP / offline" in shown
