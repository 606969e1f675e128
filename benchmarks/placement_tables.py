# SPDX-License-Identifier: Apache-2.0
"""Tables of a supernet's placements: their measured steps, as layers add up, and as predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measured_tables import load

MIXERS = ("attention", "sliding_window", "kda", "gdn")
#: speeds relative to all-attention at a context of 16K, of another engine on H100s
PUBLISHED = {
    "all-attention": 1.0,
    "Idealized All-18": 1.1,
    "Reg Lklhd-26": 1.5,
    "Reg Lklhd-18": 2.2,
    "Idealized All-6": 2.5,
    "Reg Lklhd-13": 2.7,
    "Reg Lklhd-10": 4.2,
}


@dataclass(frozen=True)
class Measured:
    """A decode step of `batch` requests of `context` tokens, in milliseconds: measured, and as
    `vllm explain` predicts it. `layers`: how many have each mixer."""

    placement: str
    layers: dict[str, int]
    batch: int
    context: int
    ms: float
    explain_ms: float


def steps() -> str:
    """What was measured on one H200."""
    return rows(load("h200_placements.json"))


def by_parts(one: Measured, found: Sequence[Measured]) -> float:
    """Milliseconds that a placement should take if layers add up: the mean of the uniform ones',
    weighted by its layers. These have what is outside of layers, too, and as many layers."""
    point = one.batch, one.context
    uniform = {
        next(iter(other.layers)): other.ms
        for other in found
        if len(other.layers) == 1 and (other.batch, other.context) == point
    }
    total = sum(number * uniform[mixer] for mixer, number in one.layers.items())
    return total / sum(one.layers.values())


def rows(data: Sequence[Mapping[str, Any]]) -> str:
    """A line per placement, a column per point; then the speed at the last one."""
    found = [Measured(**row) for row in data]
    points = list(dict.fromkeys((one.batch, one.context) for one in found))
    head = [f"{batch} × {context:,}" for batch, context in points]
    lines = [
        f"| layers of {'/'.join(MIXERS).replace('_', ' ')} | {' | '.join(head)} "
        f"| speed at {head[-1]} | published at 16K |",
        "|---" * (len(points) + 3) + "|",
    ]
    placements = list(dict.fromkeys(one.placement for one in found))
    steps = {name: [one for one in found if one.placement == name] for name in placements}
    for name in placements:
        mixers = steps[name][0].layers
        layers = "/".join(str(mixers.get(mixer, 0)) for mixer in MIXERS)
        cells = [name if len(mixers) == 1 else f"{name}, {layers}"]
        cells += [_cell(one, found) for one in steps[name]]
        cells.append(f"{steps['all-attention'][-1].ms / steps[name][-1].ms:.2f} ×")
        cells.append(f"{PUBLISHED[name]:.1f} ×" if name in PUBLISHED else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(one: Measured, found: Sequence[Measured]) -> str:
    predicted = f"{one.ms / one.explain_ms:.2f}"
    if len(one.layers) > 1:
        predicted = f"{one.ms / by_parts(one, found):.2f}, {predicted}"
    return f"{one.ms:.2f} ms ({predicted})"
