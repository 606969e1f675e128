# SPDX-License-Identifier: Apache-2.0
"""How even placements of experts make the ranks, and how many experts move when loads change.

`python -m benchmarks.expert_placement`: loads are drawn from a log-normal distribution.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import mean

import numpy as np

from vllm.model_executor.layers.expert_placement import improved, moves, place

#: experts, ranks, copies
LAYOUTS = ((128, 8, 0), (128, 8, 16), (256, 8, 32), (256, 32, 32))
HEADER = (
    "experts, ranks, copies",
    "equal runs",
    "placed",
    "after a change",
    "rearranged",
    "moves",
    "ms",
)
CHANGES, TOKENS = 3, 1_000_000


def balancedness(loads: Sequence[int]) -> float:
    """The mean over the largest."""
    return sum(loads) / (len(loads) * max(loads))


def counts(weights: np.ndarray) -> list[int]:
    """Tokens of each expert."""
    return [int(share * TOKENS) for share in weights / weights.sum()]


def measure(
    experts: int, ranks: int, copies: int, sigma: float, drift: float, layers: int
) -> list[float]:
    """Balancedness of equal runs, of a placement, after a change and after each rearrangement;
    experts that move then; and milliseconds that planning takes per layer."""
    rng = np.random.default_rng(0)
    found: list[list[float]] = [[] for _ in range(6)]
    for _ in range(layers):
        weights = rng.lognormal(0, sigma, experts)
        tokens = counts(weights)
        ends = [experts * rank // ranks for rank in range(ranks + 1)]
        runs = [sum(tokens[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
        found[0].append(balancedness(runs))
        start = place([0] * experts, ranks, (experts + copies) // ranks)
        present = improved(start, tokens)
        found[1].append(present.balancedness(tokens))
        for _ in range(CHANGES):
            weights = weights * rng.lognormal(0, drift, experts)
            tokens = counts(weights)
            found[2].append(present.balancedness(tokens))
            began = time.perf_counter()
            planned = improved(present, tokens)
            moved = moves(present, planned)
            found[5].append((time.perf_counter() - began) * 1e3)
            present = planned
            found[3].append(present.balancedness(tokens))
            found[4].append(len(moved))
    return [mean(column) for column in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sigma", type=float, default=1.0, help="Of the loads' logarithms.")
    parser.add_argument("--drift", type=float, default=0.1, help="Of each change's logarithms.")
    parser.add_argument("--layers", type=int, default=20)
    args = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |")
    print("|---" * len(HEADER) + "|")
    for layout in LAYOUTS:
        *balanced, moved, ms = measure(*layout, args.sigma, args.drift, args.layers)
        shown = " | ".join(f"{one:.3f}" for one in balanced)
        slots = layout[0] + layout[2]
        print(f"| {', '.join(map(str, layout))} | {shown} | {moved:.0f} of {slots} | {ms:.1f} |")


if __name__ == "__main__":
    main()
