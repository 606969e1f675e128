# SPDX-License-Identifier: Apache-2.0
"""Tables of mixtures of experts, measured on one H200."""

from __future__ import annotations

from benchmarks.measured_tables import compared, load

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
    """The whole engine beside the peer."""
    found = load("h200_mixture.json")
    rows = [
        "| workload, 35B-A3B dimensions, bf16, one H200 | here | vLLM 0.24.0 | ratio |",
        "|---|---|---|---|",
        compared("start, empty kernel cache", "s", found["init_s"], _PEER_START_S, False),
    ]
    for name, (peer, what, unit, key, scale, more) in _WORKLOADS.items():
        rows.append(compared(what, unit, found[name][key] * scale, peer, more))
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
