# SPDX-License-Identifier: Apache-2.0
"""Timing every alternative of a space and keeping the fastest."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

from vllm import envs
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.triton.compile_ahead import ParallelCompilation, noted_launches
from vllm.kernels.triton.configs import device_configs, use_configs
from vllm.kernels.triton.tile_files import Configs, Tile, TileFile, file_name, write_tile_file
from vllm.kernels.tuning.spaces import Space
from vllm.kernels.tuning.workloads import Run, Workloads

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


class DeviceTimer:
    """Medians of CUDA graph replays, the L2 cache flushed in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compile(self, alternatives: Iterable[Configs], runs: Iterable[Run]) -> None:
        """Compile what the alternatives need, in parallel; what fails is found when it is timed."""
        with noted_launches() as variants:
            for configs in alternatives:
                use_configs(self._device, configs)
                for run in runs:
                    run()
        ParallelCompilation(variants, self._device).settle()

    def __call__(self, configs: Configs, run: Run) -> float | None:
        """Microseconds; None when the kernel does not compile or needs more than the GPU has."""
        use_configs(self._device, configs)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                run()
        except TritonError:
            return None
        except RuntimeError as error:
            if "PassManager::run failed" in str(error):
                return None
            raise
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        return 1e3 * float(triton.testing.do_bench(graph.replay, return_mode="median"))


def tune(spaces: Sequence[Space], output: Path | None, report: Callable[[Result], None]) -> Path:
    """Tune `spaces` one after another, from what serving uses now, and write all tables.

    `output` None: the file of this GPU in VLLM_TUNED_CONFIG_FOLDER, else in the current directory.
    The file is written after every space, so an interrupted run keeps what it found.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    folder = Path(envs.VLLM_TUNED_CONFIG_FOLDER or ".")
    path = output or folder / file_name(properties.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    configs = device_configs(device)
    # Without a capability: the parameters are Triton's, also where CUDA C++ serves.
    workloads = Workloads(CudaKernels(), device)
    timer = DeviceTimer(device)
    for space in spaces:
        runs = space.runs(workloads)
        timer.compile([with_tile(configs, space, tile) for tile in space.tiles], runs)
        result = sweep(configs, space, runs, timer)
        configs = with_tile(configs, space, result.best)
        capability = (properties.major, properties.minor)
        write_tile_file(path, TileFile(properties.name, capability, configs))
        report(result)
    return path
