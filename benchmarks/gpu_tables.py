# SPDX-License-Identifier: Apache-2.0
"""Tables of what was measured on one H200."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from benchmarks.measured_tables import compared, load

#: vLLM 0.24.0 on the same workloads and chip (recorded once, see docs/performance.md)
_PEER = {
    "start, empty kernel cache": 193.0,
    "second start": 133.0,
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
    "start, empty kernel cache": 2.0,
    "second start": 2.0,
    "bs1_128_256": 2.0,
    "bs8_128_256": 3700,
    "bs256_128_256": 35000,
    "prefill_64x4096": 95700,
}


def _gpu_row(name: str, what: str, unit: str, values: list[float], higher_is_better: bool) -> str:
    """The last value, the spread of all of them, the peer's and the floor."""
    ours = values[-1]
    spread = (max(values) - min(values)) / ours
    floor = _FLOOR.get(name)
    digits = 0 if max(ours, _PEER[name]) >= 1000 else 2
    cells = [
        compared(what, unit, ours, _PEER[name], higher_is_better),
        f" {floor:,.{digits}f} {unit} |" if floor is not None else " |",
        f" {spread:.1%} of {len(values)} |" if len(values) > 1 else " |",
    ]
    return "".join(cells)


def workloads() -> str:
    """The whole engine beside the peer."""
    extract = load("h200_extract.json")
    extracted = [extract[f"extract_256x2048_{i}"]["in_per_s"] for i in range(2)]
    starts_s = load("h200_starts.json")
    rows = [
        "| workload, 4B Qwen3.5 dimensions, bf16, one H200 | here | vLLM 0.24.0 | ratio "
        "| floor | spread |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("start, empty kernel cache", "second start"):
        rows.append(_gpu_row(name, f"{name}, imports included", "s", starts_s[name], False))
    rows += [
        _gpu_row(name, what, unit, values, higher)
        for name, what, unit, values, higher in _served(load("h200_serve.json"))
    ]
    what = "extraction, 256 × 2,048, 4 layers"
    rows.append(_gpu_row("extract_256x2048", what, "tok/s", extracted, True))
    return "\n".join(rows)


def _served(serve: dict[str, Any]) -> list[tuple[str, str, str, list[float], bool]]:
    """Name, description, unit, the runs' figures and whether more is better, per workload."""

    def runs(name: str, key: str, scale: float = 1.0) -> list[float]:
        return [scale * serve[run][key] for run in sorted(serve) if run.startswith(name)]

    return [
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
    ]  # fmt: skip


#: name of the dimensions, the measurement, the peer's version and its figures
_OTHER_DIMENSIONS = (
    ("Qwen3.5-9B", "h200_9b.json", "0.26.0", (5.43, 1288, 13256, 39026, 31.8, 10.87)),
    ("Qwen3-8B", "h200_8b.json", "0.33.0", (5.41, 1414, 16998, 40936, 27.65, 12.10)),
)


def other_dimensions() -> str:
    """The same workloads on two other models' dimensions, each beside its peer."""
    rows = ["| workload, bf16, one H200 |", "|---|"]
    for column, (model, file, version, peers) in enumerate(_OTHER_DIMENSIONS):
        rows[0] += f" {model} | vLLM {version} | ratio |"
        rows[1] += "---|---|---|"
        for i, (_, what, unit, values, higher) in enumerate(_served(load(file))):
            row = compared(what, unit, values[-1], peers[i], higher)
            if column == 0:
                rows.append(row)
            else:
                rows[2 + i] += row.removeprefix(f"| {what} |")
    return "\n".join(rows)


def fp8() -> str:
    """The same workloads with `quantization="fp8"`, and with `kv_cache_dtype="fp8"`, beside
    bf16."""
    weights, cache = (
        {name: values[-1] for name, _, _, values, _ in _served(load(file))}
        for file in ("h200_fp8.json", "h200_fp8_cache.json")
    )
    rows = [
        "| workload | bf16 | fp8 weights | ratio | fp8 cache | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, what, unit, values, higher in _served(load("h200_serve.json")):
        wide, digits = values[-1], 0 if values[-1] >= 1000 else 2
        cells = [f"{wide:,.{digits}f} {unit}"]
        for narrow in (weights[name], cache[name]):
            ratio = narrow / wide if higher else wide / narrow
            cells += [f"{narrow:,.{digits}f} {unit}", f"{ratio:.2f} ×"]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(rows)


def starts() -> str:
    """Seconds until ready, per kind of start."""
    rows = ["| start | seconds |", "|---|---|"]
    for name, seconds in load("h200_starts.json").items():
        rows.append(f"| {name} | {', '.join(f'{s:.1f}' for s in seconds)} |")
    return "\n".join(rows)


def kernels() -> str:
    """Kernels, alone."""
    return kernel_rows(load("h200_kernels.json"))


def kernel_rows(measured: list[dict[str, Any]]) -> str:
    """Time, least bytes or FLOP, rate and share of what the chip can do, a row per kernel."""
    rows = [
        "| kernel | size | time | bytes or FLOP | rate | of the chip |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured:
        rows.append(
            f"| {row['op']} | {row['shape']} | {row['us']:,.1f} µs | {_amount(row)} "
            f"| {row['rate']:,.0f} {row['unit']} | {row['share']:.0%} |"
        )
    return "\n".join(rows)


def _amount(row: dict[str, Any]) -> str:
    """What a kernel moves or computes, in the unit that leaves it three digits or more."""
    if "flops" in row:
        return _scaled(row["flops"], "FLOP")
    return _scaled(row["bytes"], "B")


def _scaled(amount: float, unit: str) -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if amount >= scale:
            return f"{amount / scale:.3g} {prefix}{unit}"
    return f"{amount / 1e3:.3g} k{unit}"


def steps() -> str:
    """Where the time of whole steps goes."""
    return step_rows(load("h200_steps.json"))


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
