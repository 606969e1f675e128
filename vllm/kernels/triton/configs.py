# SPDX-License-Identifier: Apache-2.0
"""The launch parameters of this GPU. Nothing is tuned while serving: they come from files.

`data/` holds what was measured, one file per GPU; `vllm tune` writes such files, and
VLLM_TUNED_CONFIG_FOLDER names a folder of the user's own, which is read first.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from vllm import decisions, envs
from vllm.kernels.triton.tile_files import (
    SHIPPED,
    Configs,
    Table,
    Tile,
    file_name,
    pick,
    read_tile_file,
)

__all__ = ["Configs", "Table", "Tile", "choose", "device_configs", "pick", "shipped", "use_configs"]


@cache
def shipped(gpu: str | None) -> Configs:
    """The parameters shipped for a GPU; None: those that fit 96 KiB of shared memory per program,
    the smallest of the supported GPUs."""
    return read_tile_file(SHIPPED / file_name(gpu)).configs


_in_use: dict[torch.device, Configs] = {}


def device_configs(device: torch.device) -> Configs:
    """The parameters for this device: the user's, else by name, else by compute capability, else
    the small ones."""
    configs = _in_use.get(device)
    if configs is None:
        configs = _in_use[device] = _configs_of(device)
    return configs


def use_configs(device: torch.device, configs: Configs) -> None:
    """Launch with `configs` from now on (for tuning)."""
    _in_use[device] = configs


def _configs_of(device: torch.device) -> Configs:
    if device.type != "cuda":
        return shipped(None)
    properties = torch.cuda.get_device_properties(device)
    chosen = choose(properties.name, (properties.major, properties.minor))
    return replace(chosen, multiprocessors=properties.multi_processor_count)


def choose(gpu: str, capability: tuple[int, int]) -> Configs:
    """The best file for a GPU, recorded as a decision.

    Raises:
        TileFileError: the user's file for this GPU cannot be used.
    """
    path, why = _best_file(gpu, capability)
    decisions.PROCESS.record("launch parameters of kernels", path.name, f"{why} ({gpu})")
    return read_tile_file(path).configs


def _best_file(gpu: str, capability: tuple[int, int]) -> tuple[Path, str]:
    missing = ""
    if folder := envs.VLLM_TUNED_CONFIG_FOLDER:
        own = Path(folder) / file_name(gpu)
        if own.is_file():
            return own, f"from VLLM_TUNED_CONFIG_FOLDER={folder}"
        missing = f"; VLLM_TUNED_CONFIG_FOLDER={folder} has no {own.name}"
    named = SHIPPED / file_name(gpu)
    if named.is_file():
        return named, f"measured on this GPU{missing}"
    for path in sorted(SHIPPED.glob("*.json")):
        if read_tile_file(path).capability == capability:
            return path, f"measured on another GPU of this generation{missing}"
    return SHIPPED / file_name(None), f"not measured; fits 96 KiB of shared memory{missing}"
