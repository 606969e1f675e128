# SPDX-License-Identifier: Apache-2.0
"""Writes the measured tables into the docs from the benchmarks' own output.

    python -m benchmarks.report

Reads `docs/measurements/*.json`; replaces what stands between `<!-- table NAME -->` and
`<!-- end -->` in the pages named below. A test checks that nobody edited a table.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from benchmarks import (
    draft_tables,
    gpu_tables,
    mixture_tables,
    placement_tables,
    process_starts,
)
from benchmarks.disaggregation import Row
from benchmarks.disaggregation import table as pairs
from benchmarks.measured_tables import DATA, ROOT, compared, load

PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "apriel2.md",
    ROOT / "docs" / "disaggregation.md",
    ROOT / "docs" / "models.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "speculative_decoding.md",
    ROOT / "docs" / "state_memory.md",
)


#: `CpuKernels.isa` as the tables name it
_INSTRUCTION_SETS = {
    "baseline": "SSE2",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
}


def cpu_table() -> str:
    """CPU figures beside transformers', from the same run; every `cpu_*.json` is four rows."""
    return cpu_rows([load(path.name) for path in sorted(DATA.glob("cpu_*.json"))])


def cpu_rows(runs: list[dict[str, Any]]) -> str:
    """Runs of one instruction set stand together, the widest first."""
    order = list(_INSTRUCTION_SETS)
    rows = [
        "| random 120M Qwen3.5 on 2 CPU cores | here | transformers | ratio |",
        "|---|---|---|---|",
    ]
    for data in sorted(runs, key=lambda run: -order.index(run["instruction_set"])):
        where = f"{data['dtype']}, {_INSTRUCTION_SETS[data['instruction_set']]}"
        for what, key in (
            ("decode step, batch 8", "decode_step_ms"),
            (f"prefill of {data['prefill_tokens']:,} tokens", "prefill_ms"),
        ):
            pair = data[key]
            label = f"{what}, {where}"
            rows.append(compared(label, "ms", pair["ours"], pair["transformers"], False))
    return "\n".join(rows)


def api_table() -> str:
    """CPU time of the API process per streamed token."""
    rows = [
        "| route | streams | tokens/s | CPU per token | of which the system | of one core at "
        "1,000 tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for route in ("completions", "chat", "chat_parsers"):
        data = load(f"api_overhead_{route}.json")
        for point in data["points"]:
            cost = point["cpu_us_per_token"]
            rows.append(
                f"| {data['route']} | {point['streams']} | {point['tokens_per_s']:,} "
                f"| {cost:.1f} µs | {point['system_us_per_token']:.1f} µs | {cost / 10:.1f} % |"
            )
    return "\n".join(rows)


def http_table() -> str:
    """Streams over HTTP beside the same load offline; one sweep per number of API processes."""
    rows = [
        "| streams | API processes | tokens/s | offline | ratio | first token, p50 | p99 "
        "| all first tokens, offline | gap, p50 | p99 | CPU per token: API | core | client |",
        "|---" * 13 + "|",
    ]
    for name in ("h200_http.json", "h200_http_4.json"):
        data = load(name)
        for p in data["points"]:
            cells = [
                f"{p['streams']:,}",
                f"{data['options']['api_server_count']}",
                f"{p['tokens_per_s']:,.0f}",
                f"{p['offline_tokens_per_s']:,.0f}",
                f"{p['ratio']:.2f}",
                *(f"{p[key]:,.0f} ms" for key in ("ttft_p50_ms", "ttft_p99_ms")),
                f"{p['offline_first_ms']:,.0f} ms",
                *_gaps_and_cpu(p),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _gaps_and_cpu(point: dict[str, float]) -> list[str]:
    gaps = [f"{point[key]:.1f} ms" for key in ("itl_p50_ms", "itl_p99_ms")]
    return gaps + [f"{point[key]:.0f} µs" for key in ("api_us", "engine_us", "client_us")]


def http_rates_table() -> str:
    """Streams over HTTP that come at a rate."""
    rows = [
        "| requests/s | tokens/s | first token, p50 | p99 | gap, p50 | p99 "
        "| CPU per token: API | core | client |",
        "|---" * 9 + "|",
    ]
    for p in load("h200_http_rates.json")["points"]:
        cells = [f"{p['rate']:g}", f"{p['tokens_per_s']:,.0f}"]
        cells += [f"{p[key]:,.1f} ms" for key in ("ttft_p50_ms", "ttft_p99_ms")]
        cells += _gaps_and_cpu(p)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def disaggregation_table() -> str:
    """Prompts on one GPU and answers on another, by connector."""
    parts = []
    for name, connector in (("p2p", "P2pConnector"), ("nixl", "NixlConnector")):
        rows = [Row(**row) for row in load(f"h200_disaggregation_{name}.json")]
        parts.append(f"`{connector}`, through {rows[0].through}:\n\n{pairs(rows)}")
    return "\n\n".join(parts)


def host_table() -> str:
    """CPU time of the core's process per decode step."""
    rows = [
        "| decodes | core, per step | of which the scheduler | encoding the outputs | per token "
        "| of the core | receiving a request |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {one['batch']:,} | {one['core_ms']:.2f} ms | {one['scheduler_ms']:.2f} ms "
        f"| {one['encode_ms']:.2f} ms | {one['encode_us_per_token']:.2f} µs "
        f"| {one['encode_share']:.1%} | {one['receive_us_per_request']:.0f} µs |"
        for one in load("host_step.json")["results"]
    ]
    return "\n".join(rows)


def prefix_cache_table() -> str:
    """Prefix-cache policies on the agent trace, from the simulation."""
    return prefix_cache_rows(load("prefix_cache.json")["results"])


def prefix_cache_rows(results: list[dict[str, Any]]) -> str:
    """One row per policy, one column per size of the cache; then ours at a tenth of the bytes."""
    sizes = sorted({r["memory_bytes"] for r in results if r["memory_bytes"] is not None})
    names = list(dict.fromkeys(r["policy"] for r in results))
    found = {
        (r["policy"], r["memory_bytes"]): r for r in results if r["checkpoint_limit_bytes"] is None
    }
    tenth = {r["policy"]: r for r in results if r["checkpoint_limit_bytes"] is not None}
    head = [f"{size / 1e9:g} GB" for size in sizes]
    rows = [
        f"| prompt tokens found, cache of | {' | '.join(head)} | unlimited | checkpoints then | "
        "limited to a tenth |",
        "|---" * (len(sizes) + 4) + "|",
    ]
    for name in names:
        cells = [f"{found[name, size]['hit_rate']:.1%}" for size in [*sizes, None]]
        cells.append(f"{found[name, None]['peak_checkpoint_bytes'] / 1e9:.0f} GB")
        limited = tenth.get(name)
        cells.append(
            f"{limited['hit_rate']:.1%} in {limited['peak_checkpoint_bytes'] / 1e9:.1f} GB"
            if limited
            else ""
        )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def prefix_cache_live_table() -> str:
    """The agent trace on a running engine beside its simulation."""
    return prefix_cache_live_rows(load("prefix_cache_live.json"))


def prefix_cache_live_rows(data: dict[str, Any]) -> str:
    """One row per size of the arena; then the simulation without a limit."""
    rows = [
        "| arena | found, live | simulated | aligned | every block | checkpoints, live | aligned "
        "| every block | lost: evicted | no checkpoint |",
        "|---" * 10 + "|",
    ]

    def cells(simulated: dict[str, Any], rate: str, held: str, lost: list[str]) -> str:
        others = [simulated[name] for name in ("aligned", "every block")]
        found = [rate, *(f"{s['hit_rate']:.1%}" for s in (simulated["exact"], *others))]
        sizes = [held, *(f"{s['peak_checkpoint_bytes'] / 1e6:.1f} MB" for s in others)]
        return " | ".join([*found, *sizes, *lost])

    for run in data["runs"]:
        lost = [
            f"{run['lost_tokens'].get(reason, 0) / run['prompt_tokens']:.1%}"
            for reason in ("evicted", "no_checkpoint")
        ]
        held = f"{run['peak_checkpoint_bytes'] / 1e6:.1f} MB"
        row = cells(run["simulated"], f"{run['hit_rate']:.1%}", held, lost)
        rows.append(f"| {run['memory_bytes'] / 1e6:g} MB | {row} |")
    rows.append(f"| unlimited | {cells(data['runs'][-1]['unlimited'], '', '', ['', ''])} |")
    return "\n".join(rows)


TABLES = {
    "gpu": gpu_tables.workloads,
    "dimensions": gpu_tables.other_dimensions,
    "fp8": gpu_tables.fp8,
    "starts": gpu_tables.starts,
    "process_starts": lambda: process_starts.rows(load("process_starts.json")),
    "kernels": gpu_tables.kernels,
    "steps": gpu_tables.steps,
    "mixture": mixture_tables.served,
    "experts": mixture_tables.experts,
    "placements": placement_tables.steps,
    "drafts": draft_tables.gains,
    "cpu": cpu_table,
    "api": api_table,
    "http": http_table,
    "http_rates": http_rates_table,
    "disaggregation": disaggregation_table,
    "host": host_table,
    "prefix_cache": prefix_cache_table,
    "prefix_cache_live": prefix_cache_live_table,
}


def rendered(text: str) -> str:
    """`text` with every marked table made anew."""

    def replace(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", replace, text, flags=re.DOTALL)


def main() -> int:
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
        print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
