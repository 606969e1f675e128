# SPDX-License-Identifier: Apache-2.0
"""Tables of mixtures of experts, measured on one H200."""

from __future__ import annotations

from benchmarks.measured_tables import compared, load, rounded

#: workload -> vLLM 0.24.0 on the same dimensions and chip (recorded once), description, unit, which
#: of the result's figures, its scale, and whether more is better
_WORKLOADS = {
    "bs1_128_256_1": (
        4.49, "1 request, 128 in, 256 out: time per token", "ms", "s", 1e3 / 256, False,
    ),
    "bs8_128_256": (726, "8 requests, 128 in, 256 out", "tok/s out", "out_per_s", 1.0, True),
    "bs256_128_256_1": (8038, "256 requests, 128 in, 256 out", "tok/s out", "out_per_s", 1.0, True),
    "prefill_64x4096_1": (59930, "prefill, 64 × 4,096", "tok/s", "in_per_s", 1.0, True),
    "mixed_512": (38.3, "512 mixed requests", "s", "s", 1.0, False),
    "long_32x12000_64": (7.76, "32 × 12,000 in, 64 out", "s", "s", 1.0, False),
}  # fmt: skip
_PEER_START_S = 210


def served() -> str:
    """The whole engine beside the peer, and with float8 weights."""
    found, float8 = load("h200_mixture.json"), load("h200_mixture_fp8.json")
    rows = [
        "| workload, 35B-A3B dimensions, one H200 | here, bf16 | vLLM 0.24.0, bf16 | ratio "
        "| here, float8 |",
        "|---" * 5 + "|",
        compared("start, empty kernel cache", "s", found["init_s"], _PEER_START_S, False)
        + f" {rounded(float8['init_s'], 's')} |",
    ]
    for name, (peer, what, unit, key, scale, more) in _WORKLOADS.items():
        ours, with_float8 = (figures[name][key] * scale for figures in (found, float8))
        row = compared(what, unit, ours, peer, more)
        rows.append(f"{row} {rounded(with_float8, unit)} |")
    return "\n".join(rows)


def experts() -> str:
    """One layer's experts by number of tokens, beside what the chip allows."""
    rows = [
        "| tokens | experts hit | routing | experts | GB/s | TFLOP/s | floor |",
        "|---" * 7 + "|",
    ]
    for tokens, row in load("h200_moe.json")["tokens"].items():
        rows.append(
            f"| {int(tokens):,} | {row['experts_hit']} | {row['route_us']:.1f} µs "
            f"| {row['experts_us']:,.1f} µs | {row['GB/s']:,.0f} | {row['TFLOP/s']:.0f} "
            f"| {row['floor_us']:,.1f} µs |"
        )
    return "\n".join(rows)
