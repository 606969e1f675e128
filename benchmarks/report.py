# SPDX-License-Identifier: Apache-2.0
"""Writes the measured tables into the docs from the benchmarks' own output.

    python benchmarks/report.py

Reads `docs/measurements/*.json`; replaces what stands between `<!-- table NAME -->` and
`<!-- end -->` in the pages named below. A test checks that nobody edited a table.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "measurements"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "state_memory.md",
)

#: vLLM 0.24.0 on the same workloads and chip (recorded once, see docs/performance.md)
_PEER = {
    "start": 193.0,
    "bs1_128_256": 3.69,
    "bs8_128_256": 1977,
    "bs256_128_256": 17313,
    "prefill_64x4096": 65469,
    "mixed_512": 21.05,
    "long_32x12000_64": 6.78,
    "extract_256x2048": 65266,
}


#: what the chip allows, by arithmetic: 4.3 TB/s and 790 TFLOP/s as measured on it
_FLOOR = {
    "start": 2.0,
    "bs1_128_256": 2.0,
    "bs8_128_256": 3700,
    "bs256_128_256": 35000,
    "prefill_64x4096": 95700,
}


def _load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / name).read_text())
    return data


def _row(what: str, unit: str, ours: float, peer: float, higher_is_better: bool) -> str:
    ratio = ours / peer if higher_is_better else peer / ours
    digits = 0 if max(ours, peer) >= 1000 else 2
    return f"| {what} | {ours:,.{digits}f} {unit} | {peer:,.{digits}f} {unit} | {ratio:.2f} × |"


def _gpu_row(name: str, what: str, unit: str, values: list[float], higher_is_better: bool) -> str:
    """The last value, the spread of all of them, the peer's and the floor."""
    ours = values[-1]
    spread = (max(values) - min(values)) / ours
    floor = _FLOOR.get(name)
    digits = 0 if max(ours, _PEER[name]) >= 1000 else 2
    cells = [
        _row(what, unit, ours, _PEER[name], higher_is_better),
        f" {floor:,.{digits}f} {unit} |" if floor is not None else " |",
        f" {spread:.1%} of {len(values)} |" if len(values) > 1 else " |",
    ]
    return "".join(cells)


def gpu_table() -> str:
    """Whole-engine figures on one H200 beside the peer's."""
    serve, extract = _load("h200_serve.json"), _load("h200_extract.json")

    def runs(name: str, key: str, scale: float = 1.0) -> list[float]:
        return [scale * serve[run][key] for run in sorted(serve) if run.startswith(name)]

    start = serve["import_s"] + serve["init_s"]
    workloads: list[tuple[str, str, str, list[float], bool]] = [
        ("start", "start, import included", "s", [start], False),
        ("bs1_128_256", "1 request, 128 in, 256 out: time per token", "ms",
         runs("bs1_128_256", "s", 1e3 / 256), False),
        ("bs8_128_256", "8 requests, 128 in, 256 out", "tok/s out",
         runs("bs8_128_256", "out_per_s"), True),
        ("bs256_128_256", "256 requests, 128 in, 256 out", "tok/s out",
         runs("bs256_128_256", "out_per_s"), True),
        ("prefill_64x4096", "prefill, 64 × 4,096", "tok/s",
         runs("prefill_64x4096", "in_per_s"), True),
        ("mixed_512", "512 mixed requests", "s", runs("mixed_512", "s"), False),
        ("long_32x12000_64", "32 × 12,000 in, 64 out", "s", runs("long_32x12000_64", "s"), False),
        ("extract_256x2048", "extraction, 256 × 2,048, 4 layers", "tok/s",
         [extract[f"extract_256x2048_{i}"]["in_per_s"] for i in range(2)], True),
    ]  # fmt: skip
    rows = [
        "| workload, 4B Qwen3.5 dimensions, bf16, one H200 | here | vLLM 0.24.0 | ratio "
        "| floor | spread |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(rows + [_gpu_row(*workload) for workload in workloads])


def step_table() -> str:
    """Where the time of whole steps went before the decode and prefill kernels were rewritten."""
    return step_rows(_load("h200_steps_before.json"))


def step_rows(windows: dict[str, Any], most: int = 6) -> str:
    """One row per kind of step: wall time, device time and its largest kernels."""
    rows = ["| step | wall | kernels | of which |", "|---|---|---|---|"]
    for name, window in windows.items():
        spent: dict[str, float] = defaultdict(float)
        for kernel, row in window["kernels"].items():
            spent[_short(kernel)] += row["us"]
        largest = sorted(spent.items(), key=lambda item: -item[1])[:most]
        parts = [f"{kernel} {us / 1e3:.2f}" for kernel, us in largest]
        rows.append(
            f"| {name.replace('_', ' ')} | {window['wall_us'] / 1e3:.2f} ms "
            f"| {window['device_us'] / 1e3:.2f} ms | {', '.join(parts)} |"
        )
    return "\n".join(rows)


def _short(kernel: str) -> str:
    """A kernel's name without its template, and without what says how cuBLAS tiles it."""
    name = re.sub(r"<.*|\(.*", "", kernel.removeprefix("void ")).split("::")[-1]
    return "cuBLAS" if name.startswith("nvjet") else name.strip("_").removesuffix("_kernel")


def cpu_table() -> str:
    """CPU figures beside transformers', from the same run."""
    rows = [
        "| random 120M Qwen3.5 on 2 CPU cores | here | transformers | ratio |",
        "|---|---|---|---|",
    ]
    for name in ("cpu_bfloat16.json", "cpu_float32.json"):
        data = _load(name)
        for key, what in (
            ("decode", "decode step, batch 8"),
            ("prefill", "prefill of 2,048 tokens"),
        ):
            pair = data["decode_step_ms" if key == "decode" else "prefill_2048_ms"]
            label = f"{what}, {data['dtype']}"
            rows.append(_row(label, "ms", pair["ours"], pair["transformers"], False))
    return "\n".join(rows)


def api_table() -> str:
    """CPU time of the API process per streamed token."""
    rows = [
        "| route | streams | tokens/s | CPU per token | of one core at 1,000 tokens/s |",
        "|---|---|---|---|---|",
    ]
    for route in ("completions", "chat"):
        data = _load(f"api_overhead_{route}.json")
        cost = data["cpu_ms_per_token"]
        rows.append(
            f"| {data['route']} | {data['streams']} | {data['tokens_per_s']:,} "
            f"| {cost * 1e3:.0f} µs | {cost * 100:.1f} % |"
        )
    return "\n".join(rows)


def prefix_cache_table() -> str:
    """Prefix-cache policies on the agent trace, from the simulation."""
    return prefix_cache_rows(_load("prefix_cache.json")["results"])


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
    return prefix_cache_live_rows(_load("prefix_cache_live.json"))


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
    "gpu": gpu_table,
    "steps": step_table,
    "cpu": cpu_table,
    "api": api_table,
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
