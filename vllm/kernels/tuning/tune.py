# SPDX-License-Identifier: Apache-2.0
"""From spaces to a file of launch parameters for this GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vllm import envs
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.triton.configs import device_configs
from vllm.kernels.triton.tile_files import TileFile, file_name, write_tile_file
from vllm.kernels.tuning.device_timer import DeviceTimer
from vllm.kernels.tuning.spaces import Space
from vllm.kernels.tuning.sweep import Result, sweep, with_tile
from vllm.kernels.tuning.workloads import Workloads


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
