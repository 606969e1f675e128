# SPDX-License-Identifier: Apache-2.0
"""The parts of `benchmarks.http_streams` and `benchmarks.client_storm` that need no server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import client_storm
from benchmarks.http_streams import Point, parse_arguments, plot, table
from benchmarks.token_source import servable

POINT = Point(
    streams=8,
    rate=float("inf"),
    requests=8,
    output_tokens=2048,
    seconds=2.0,
    tokens_per_s=1024.0,
    ttft_p50_ms=1.0,
    ttft_p99_ms=2.0,
    itl_p50_ms=0.5,
    itl_p99_ms=0.75,
    api_processes=1,
    api_us=50.0,
    engine_us=20.0,
    client_us=10.0,
    client_processes=2,
    client_busy=0.5,
    client_limited=False,
)


def test_a_row_per_number_of_streams() -> None:
    head, rule, row = table([POINT]).split("\n")
    assert head.count("|") == rule.count("|") == row.count("|")
    assert "| 8 | 1,024 | 1.0 ms | 2.0 ms | 0.50 ms | 0.75 ms | 1 | 50.0 µs | 20,000 |" in row
    assert row.endswith("| 2 | 50% |") and "offline" not in head


def test_the_ratio_is_what_http_leaves() -> None:
    compared = replace(POINT, offline_tokens_per_s=2048.0, offline_first_ms=12.5)
    assert compared.ratio == 0.5 and POINT.ratio is None
    head, _, row = table([compared]).split("\n")
    assert head.endswith("| offline tok/s | HTTP / offline | all first tokens, offline |")
    assert row.endswith("| 2,048 | 0.50 | 12.5 ms |")


def test_paced_loads_say_their_rate() -> None:
    head, _, row = table([replace(POINT, rate=20.0)]).split("\n")
    assert head.startswith("| streams | requests/s | tok/s |") and row.startswith(
        "| 8 | 20 | 1,024"
    )
    assert parse_arguments(["--rate", "5,20"]).rate == [5.0, 20.0]


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(tmp_path / "p.png", [POINT, replace(POINT, streams=64)], "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words", [["--streams", "0"], ["--streams", "a"], ["a=1"], ["--model", "m", "--step-ms", "1"]]
)
def test_words_that_cannot_be(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words)


def test_a_model_of_dimensions_gets_a_text_for_every_token(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "served").mkdir()
    config = {"model_type": "qwen3_5", "text_config": {"vocab_size": 6000}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    made = servable(tmp_path / "model", tmp_path / "served")
    assert json.loads((made / "config.json").read_text()) == config
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert len(tokenizer) == 6000
    special = set(tokenizer.all_special_ids)
    texts = [tokenizer.decode([i]) for i in range(6000) if i not in special]
    assert all(texts) and len(special) == 1
    text = "Tell me about state memory."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert servable(made, tmp_path) == made


@pytest.mark.parametrize(("num_clients", "num_processes"), [(2000, 8), (240, 1), (10, 3), (7, 2)])
def test_the_storm_is_the_same_from_several_processes(num_clients: int, num_processes: int) -> None:
    counts = client_storm.shares(num_clients, num_processes)
    assert len(counts) == num_processes and sum(counts) == num_clients
    assert sum(count // 3 for count in counts) == num_clients // 3
    assert max(counts) - min(counts) <= 5


def test_processes_of_a_storm() -> None:
    assert client_storm.choose_num_processes(2000, 16) == 4
    assert client_storm.choose_num_processes(2000, 2) == 1
    assert client_storm.choose_num_processes(3, 16) == 1
