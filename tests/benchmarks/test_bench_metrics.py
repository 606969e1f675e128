# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of `vllm bench serve`."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.benchmarks.arrivals import Load, arrival_times
from vllm.benchmarks.metrics import Distribution, output_rate, summarize
from vllm.benchmarks.outcome import Outcome
from vllm.benchmarks.result import details, figures, table
from vllm.benchmarks.speculation import SpeculationCounts, speculation_result

#: three tokens; one token; none, because it failed
THREE = Outcome(start=0.0, prompt_len=10, ttft=0.5, itl=[0.1, 0.3], latency=0.9, output_len=3)
ONE = Outcome(start=0.2, prompt_len=20, ttft=1.5, latency=1.5, output_len=1, text="x")
FAILED = Outcome(start=0.1, prompt_len=30, latency=0.3, error="no")


def test_throughput_counts_what_succeeded() -> None:
    summary = summarize([THREE, ONE, FAILED], 2.0, [99])
    assert (summary.completed, summary.failed) == (2, 1)
    assert (summary.total_input_tokens, summary.total_output_tokens) == (30, 4)
    assert (summary.request_throughput, summary.output_throughput) == (1.0, 2.0)
    assert summary.total_token_throughput == 17.0 and summary.request_goodput is None


def test_latencies_in_milliseconds() -> None:
    latencies = summarize([THREE, ONE, FAILED], 2.0, [50, 99]).latencies
    assert latencies["ttft"].mean == pytest.approx(1000)
    assert latencies["ttft"].std == pytest.approx(500)
    assert latencies["tpot"].mean == pytest.approx(200)
    assert latencies["tpot"].count == 1
    assert latencies["itl"].median == pytest.approx(200)
    assert latencies["e2el"].percentiles == pytest.approx({50: 1200, 99: 1494})


@pytest.mark.parametrize(
    ("levels", "good"),
    [
        ({"ttft": 1500.0}, 2),
        ({"ttft": 1499.0}, 1),
        ({"tpot": 200.0}, 2),
        ({"tpot": 199.0}, 1),
        ({"ttft": 1500.0, "e2el": 1000.0}, 1),
        ({"e2el": 100.0}, 0),
    ],
)
def test_goodput_needs_every_level(levels: dict[str, float], good: int) -> None:
    assert summarize([THREE, ONE, FAILED], 2.0, [99], levels).request_goodput == good / 2


def test_peaks() -> None:
    summary = summarize([THREE, ONE, FAILED], 2.0, [99])
    # seconds 0 and 1: tokens at 0.5, 0.6, 0.9 and at 1.7
    assert output_rate([THREE, ONE]) == pytest.approx([3, 1])
    assert summary.max_output_tokens_per_s == pytest.approx(3)
    assert summary.max_concurrent_requests == 3
    after = Outcome(start=0.9, prompt_len=1, ttft=0.1, latency=0.1, output_len=1)
    assert summarize([THREE, after], 1.0, []).max_concurrent_requests == 1


def test_a_chunk_of_several_tokens_weighs_as_many() -> None:
    chunks = Outcome(start=0.0, prompt_len=1, ttft=0.5, itl=[1.0], latency=1.5, output_len=8)
    assert output_rate([chunks]) == pytest.approx([4, 4])


def test_result_has_the_keys_of_result_files() -> None:
    result = figures(summarize([THREE, ONE, FAILED], 2.0, [99, 99.9], {"ttft": 1e9}))
    assert result["request_goodput"] == 1.0 and result["p99.9_itl_ms"] > result["mean_itl_ms"]
    statistics = {f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99", "p99.9")
                  for m in ("ttft", "tpot", "itl", "e2el")}  # fmt: skip
    counts = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"}
    rates = {"request_throughput", "request_goodput", "output_throughput"}
    rates |= {"total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"}
    assert set(result) == statistics | counts | rates
    assert details([ONE, FAILED])["errors"] == ["", "no"]
    assert details([ONE])["generated_texts"] == ["x"]


def test_table_shows_the_metrics_that_were_asked_for() -> None:
    summary = summarize([THREE, ONE], 2.0, [99])
    shown = table({"request_rate": "inf", "max_concurrency": None}, summary, ["ttft"])
    assert "Serving Benchmark Result" in shown and "Mean TTFT (ms):" in shown
    assert "TPOT" not in shown and "inf" not in shown and "None" not in shown
    assert "Output token throughput (tok/s):         2.00" in shown
    one = table({}, summarize([ONE], 2.0, [99]), ["tpot"])
    assert "not measured" in one and "Mean" not in one


def test_nothing_measured_is_zero() -> None:
    assert Distribution.of_seconds([], [99]) == Distribution(0, 0.0, 0.0, 0.0, {99: 0.0})
    assert summarize([FAILED], 1.0, [99]).completed == 0


# ---- arrivals ----------------------------------------------------------------------------------


def test_all_at_once() -> None:
    assert not arrival_times(Load(float("inf")), 5, 0).any()


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_the_gamma_distribution(burstiness: float) -> None:
    gaps = np.diff(arrival_times(Load(10.0, burstiness), 20_001, seed=1))
    assert gaps.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps.std() == pytest.approx(0.1 / burstiness**0.5, rel=0.05)


def test_the_seed_decides() -> None:
    load = Load(3.0)
    assert (arrival_times(load, 9, 1) == arrival_times(load, 9, 1)).all()
    assert (arrival_times(load, 9, 1) != arrival_times(load, 9, 2)).any()


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_ramp(ramp: str, middle: float) -> None:
    # Gaps of a very even process show the rate itself.
    load = Load(1.0, 1e9, ramp, 100.0)  # type: ignore[arg-type]
    rates = 1 / np.diff(arrival_times(load, 1001, 0))
    assert rates[0] == pytest.approx(1, rel=0.11) and rates[-1] == pytest.approx(100, rel=1e-3)
    assert rates[499] == pytest.approx(middle, rel=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        (0.0,),
        (1.0, 0.0),
        (1.0, 1.0, "linear"),
        (1.0, 1.0, None, 2.0),
        (float("inf"), 1, "linear", 2),
    ],
)
def test_loads_that_cannot_be(fields: tuple) -> None:
    with pytest.raises(ValueError):
        Load(*fields)


# ---- speculation -------------------------------------------------------------------------------

METRICS = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1"} 30.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 80.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 20.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 16.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
"""


def test_speculation_from_metrics() -> None:
    result = speculation_result(SpeculationCounts(), SpeculationCounts.parse(METRICS))
    assert result == {
        "spec_decode_acceptance_rate": 25.0,
        "spec_decode_acceptance_length": 1.5,
        "spec_decode_num_drafts": 40,
        "spec_decode_draft_tokens": 80,
        "spec_decode_accepted_tokens": 20,
        "spec_decode_per_position_acceptance_rates": [0.4, 0.1],
    }
    shown = table(result, summarize([THREE], 1.0, [99]), [])
    assert "Acceptance length:                       1.50" in shown


def test_steps_of_fewer_drafts_are_no_try_of_the_positions_past_them() -> None:
    name = "vllm:spec_decode_num_draft_tokens_per_pos"
    more = [f"# TYPE {name} counter"]
    more += [f'{name}_total{{engine="0",position="{i}"}} {n}' for i, n in enumerate((40, 8))]
    after = SpeculationCounts.parse(METRICS + "\n".join(more) + "\n")
    rates = "spec_decode_per_position_acceptance_rates"
    assert speculation_result(SpeculationCounts(), after)[rates] == [0.4, 0.5]
    before = SpeculationCounts(20, 40, 10, {0: 8, 1: 3}, {0: 20, 1: 6})
    assert speculation_result(before, after)[rates] == [0.4, 0.5]


def test_only_what_the_run_added_counts() -> None:
    counts = SpeculationCounts.parse(METRICS)
    assert speculation_result(counts, counts) == {} == speculation_result(None, counts)
    before = SpeculationCounts(20, 40, 10, {0: 8})
    added = speculation_result(before, counts)
    assert added["spec_decode_acceptance_rate"] == 25.0
    assert added["spec_decode_acceptance_length"] == 1.5
    assert added["spec_decode_num_drafts"] == 20 and added["spec_decode_draft_tokens"] == 40
    assert added["spec_decode_per_position_acceptance_rates"] == [0.4, 0.2]
