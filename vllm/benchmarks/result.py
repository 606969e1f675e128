# SPDX-License-Identifier: Apache-2.0
"""The table of `vllm bench serve`, and its result file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm.benchmarks.metrics import METRICS, Distribution, Summary
from vllm.benchmarks.outcome import Outcome

_WIDTH = 50


def percentile_name(percentile: float) -> str:
    """`99`, `99.9`."""
    return f"{percentile:g}"


def figures(summary: Summary) -> dict[str, Any]:
    """The summary as entries of a result file."""
    result = dict(vars(summary))
    del result["latencies"]
    for name, values in summary.latencies.items():
        result |= {
            f"mean_{name}_ms": values.mean,
            f"median_{name}_ms": values.median,
            f"std_{name}_ms": values.std,
        }
        for percentile, value in values.percentiles.items():
            result[f"p{percentile_name(percentile)}_{name}_ms"] = value
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Per request, in the order they were sent; seconds."""
    return {
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_len for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itl for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
    }


def table(result: dict[str, Any], summary: Summary, shown: Sequence[str]) -> str:
    """The result as text; `shown` are keys of `METRICS`."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", summary.completed),
        ("Failed requests:", summary.failed),
        ("Maximum request concurrency:", result.get("max_concurrency")),
        ("Request rate configured (RPS):", result.get("request_rate")),
        ("Benchmark duration (s):", summary.duration),
        ("Total input tokens:", summary.total_input_tokens),
        ("Total generated tokens:", summary.total_output_tokens),
        ("Request throughput (req/s):", summary.request_throughput),
        ("Request goodput (req/s):", summary.request_goodput),
        ("Output token throughput (tok/s):", summary.output_throughput),
        ("Peak output token throughput (tok/s):", summary.max_output_tokens_per_s),
        ("Peak concurrent requests:", summary.max_concurrent_requests),
        ("Total token throughput (tok/s):", summary.total_token_throughput),
    ]
    lines += [_row(label, value) for label, value in rows if value not in (None, "inf")]
    for name in shown:
        lines.append(METRICS[name].center(_WIDTH, "-"))
        lines += _latency_rows(name.upper(), summary.latencies[name])
    if "client_processes" in result:
        lines.append("Clients".center(_WIDTH, "-"))
        lines += _client_rows(result)
    if "spec_decode_acceptance_rate" in result:
        lines.append("Speculative Decoding".center(_WIDTH, "-"))
        lines += _speculation_rows(result)
    return "\n".join([*lines, "=" * _WIDTH])


def _row(label: str, value: Any) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def _latency_rows(name: str, values: Distribution) -> Iterator[str]:
    if not values.count:
        yield _row(f"{name}:", "not measured")
        return
    yield _row(f"Mean {name} (ms):", values.mean)
    yield _row(f"Median {name} (ms):", values.median)
    for percentile, value in values.percentiles.items():
        yield _row(f"P{percentile_name(percentile)} {name} (ms):", value)


def _client_rows(result: dict[str, Any]) -> Iterator[str]:
    yield _row("Client processes:", result["client_processes"])
    yield _row("Client CPU time, all processes (s):", float(sum(result["client_cpu_s"])))
    if result["client_cpu_us_per_token"] is not None:
        yield _row("Client CPU time per token (us):", result["client_cpu_us_per_token"])
    yield _row("Busiest client process (% of its time):", 100 * result["client_max_busy"])


def _speculation_rows(result: dict[str, Any]) -> Iterator[str]:
    yield _row("Acceptance rate (%):", result["spec_decode_acceptance_rate"])
    yield _row("Acceptance length:", result["spec_decode_acceptance_length"])
    yield _row("Drafts:", result["spec_decode_num_drafts"])
    yield _row("Draft tokens:", result["spec_decode_draft_tokens"])
    yield _row("Accepted tokens:", result["spec_decode_accepted_tokens"])
    for position, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
        yield _row(f"Acceptance at position {position} (%):", 100 * rate)


def save(path: Path, result: dict[str, Any], append: bool) -> None:
    """Write the result as JSON; appended results are one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        json.dump(result, file)
        if append:
            file.write("\n")
