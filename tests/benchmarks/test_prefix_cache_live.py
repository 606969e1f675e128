# SPDX-License-Identifier: Apache-2.0
"""The live run of the agent trace: a small one, and what the committed one says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.agent_trace import TraceConfig, make_trace
from benchmarks.prefix_cache_live import DATA, MODEL, compare, make_parser, parents, scaled
from benchmarks.report import prefix_cache_live_rows

pytestmark = pytest.mark.slow

SMALL = scaled(TraceConfig(conversations=4, active=2), 0.03)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """An arena with room for everything, and one that is short of it."""
    args = make_parser().parse_args(["--memory-mb", "60,6", "--concurrency", "2"])
    return compare(args, SMALL)


def test_a_drafter_leaves_what_is_found() -> None:
    drafter = {"method": "eagle3", "model": f"{MODEL}-eagle3", "num_speculative_tokens": 3}
    words = ["--memory-mb", "60", "--no-uncached", "--speculative-config", json.dumps(drafter)]
    trace = scaled(TraceConfig(conversations=2, active=2), 0.03)
    (run,) = compare(make_parser().parse_args(words), trace)["runs"]
    drafted = run["drafted"]
    assert drafted["method"] == "eagle3"
    assert drafted["prompt_tokens"] == run["prompt_tokens"]
    assert drafted["found_tokens"] >= 0.99 * run["found_tokens"] > 0


def test_lengths_are_scaled() -> None:
    half = scaled(TraceConfig(answer_median=150, max_tokens=4000), 0.5)
    assert (half.answer_median, half.max_tokens, half.mean_turns) == (75, 2000, 6.0)


def test_parents_are_what_prompts_continue() -> None:
    trace = make_trace(SMALL)
    for i, parent in enumerate(parents(trace)):
        assert (parent is None) == (trace[i].kind in ("first turn", "completion", "one-off")) or (
            trace[i].kind == "regenerated"
        )
        if parent is not None:
            tokens = trace[parent].tokens
            assert np.array_equal(tokens, trace[i].tokens[: len(tokens)])


def test_with_room_the_engine_finds_what_the_simulation_does(data: dict[str, Any]) -> None:
    run = data["runs"][0]
    expected = run["unlimited"]["exact"]
    assert run["by_kind"] == expected["by_kind"]
    assert run["hit_rate"] == expected["hit_rate"] > 0.3
    assert run["peak_checkpoint_bytes"] == expected["peak_checkpoint_bytes"]
    assert run["later_turns_complete"] == run["later_turns"] > 0
    assert "evicted" not in run["lost_tokens"]


def test_a_short_arena_loses_by_eviction(data: dict[str, Any]) -> None:
    roomy, short = data["runs"]
    assert short["prompt_tokens"] == roomy["prompt_tokens"]
    assert 0 < short["found_tokens"] < roomy["found_tokens"]
    assert short["lost_tokens"]["evicted"] > 0
    assert short["peak_checkpoint_bytes"] < short["arena_bytes"]


def test_rows(data: dict[str, Any]) -> None:
    rows = prefix_cache_live_rows(data).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| 60 MB", "| 6 MB", "| unlimited"]


def test_the_measurement_keeps_its_promise() -> None:
    """In some arena the engine finds as much as the better of vLLM's modes does without a limit,
    at a tenth of its checkpoint bytes; and it is everywhere where the simulation is."""
    runs = json.loads(DATA.read_text(encoding="utf-8"))["runs"]
    kept = []
    for run in runs:
        assert abs(run["hit_rate"] - run["simulated"]["exact"]["hit_rate"]) < 0.01
        others = [run["unlimited"][name] for name in ("aligned", "every block")]
        best = max(others, key=lambda other: other["hit_rate"])
        kept.append(
            run["hit_rate"] >= best["hit_rate"]
            and run["peak_checkpoint_bytes"] <= best["peak_checkpoint_bytes"] / 10
        )
    assert any(kept)
