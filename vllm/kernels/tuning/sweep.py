# SPDX-License-Identifier: Apache-2.0
"""Timing every alternative of a space and keeping the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.kernels.triton.tile_files import Configs, Tile
from vllm.kernels.tuning.spaces import Space
from vllm.kernels.tuning.workloads import Run

#: microseconds of one run with the given parameters; None where they cannot be launched
Timer = Callable[[Configs, Run], float | None]
#: an alternative must be faster than the present tile by more than timings scatter
_WORTH_CHANGING = 0.99


@dataclass(frozen=True)
class Result:
    """`speedup`: geometric mean over the workloads of present time by best time."""

    space: Space
    before: Tile
    best: Tile
    speedup: float
    num_timed: int


def tile_of(configs: Configs, space: Space) -> Tile:
    """The present tile of a space."""
    value: Any = getattr(configs, space.field)
    tile: Tile = value if space.width is None else value[space.width]
    return tile


def with_tile(configs: Configs, space: Space, tile: Tile) -> Configs:
    """`configs` with one tile exchanged."""
    value: Any = tile
    if space.width is not None:
        value = {**getattr(configs, space.field), space.width: tile}
    return replace(configs, **{space.field: value})


def sweep(configs: Configs, space: Space, runs: Sequence[Run], time_us: Timer) -> Result:
    """Time all alternatives of a space on its workloads `runs`.

    Raises:
        RuntimeError: neither the present tile nor any alternative can be launched.
    """
    before = tile_of(configs, space)
    present = [time_us(configs, run) for run in runs]
    known = [us for us in present if us is not None]
    best, best_score = before, 1.0 if len(known) == len(runs) else math.inf
    reference = known if len(known) == len(runs) else [1.0] * len(runs)
    num_timed = 0
    for tile in space.tiles:
        if tile == before:
            continue
        times = [time_us(with_tile(configs, space, tile), run) for run in runs]
        good = [us for us in times if us is not None]
        if len(good) < len(runs):
            continue
        num_timed += 1
        score = _geometric_mean([us / was for us, was in zip(good, reference, strict=True)])
        if score < best_score * (_WORTH_CHANGING if best == before else 1.0):
            best, best_score = tile, score
    if math.isinf(best_score):
        raise RuntimeError(f"no alternative of {space.name} can be launched on this GPU")
    speedup = 1 / best_score if len(known) == len(runs) else math.inf
    return Result(space, before, best, speedup, num_timed)


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
