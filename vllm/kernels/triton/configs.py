# SPDX-License-Identifier: Apache-2.0
"""Tile sizes and launch parameters, as data.

Nothing is tuned while serving: `benchmarks/kernels.py --sweep` times the alternatives, and the
winners are written here per GPU. Keys are the padded head dimension; wider keys serve narrower
heads. fp32 activations have their own rows: twice the shared memory, and no tensor cores.
Attention reads keys through the block table, which takes every second pipeline stage: `2 n + 1`
stages keep `n` key tiles in shared memory.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from vllm.decisions import record


@dataclass(frozen=True)
class Tile:
    """`rows` x `columns` of the kernel's main tile, and Triton's launch parameters."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


Table = dict[int, Tile]


@dataclass(frozen=True)
class Configs:
    """One GPU's tables; attention tiles are (query rows, keys), GDN tiles (keys dims, dv)."""

    multiprocessors: int
    attention_prefill: Table
    attention_prefill_fp32: Table
    attention_decode: Table
    attention_decode_fp32: Table
    gdn_decode: Tile
    gdn_state: Table
    gdn_state_fp32: Table
    gdn_intra: Tile
    gdn_output: Tile
    gdn_fp32_warps: int
    conv1d: Tile


HOPPER = Configs(
    multiprocessors=132,
    attention_prefill={
        64: Tile(128, 128, 8, 5),
        128: Tile(128, 128, 8, 3),
        256: Tile(128, 64, 8, 3),
    },
    attention_prefill_fp32={128: Tile(32, 32, 4, 1), 256: Tile(32, 16, 4, 1)},
    attention_decode={64: Tile(16, 64, 4, 7), 128: Tile(16, 64, 4, 7), 256: Tile(16, 32, 4, 7)},
    attention_decode_fp32={128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    gdn_decode=Tile(32, 256, 4, 1),
    gdn_state={64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 4, 3), 256: Tile(256, 32, 4, 2)},
    gdn_state_fp32={128: Tile(128, 32, 8, 1), 256: Tile(256, 32, 8, 1)},
    gdn_intra=Tile(64, 64, 4, 1),
    gdn_output=Tile(64, 128, 4, 1),
    gdn_fp32_warps=8,
    conv1d=Tile(16, 256, 4, 1),
)

# 96 KiB of shared memory per program, the smallest of the supported GPUs.
SMALL = Configs(
    multiprocessors=64,
    attention_prefill={64: Tile(128, 64, 4, 3), 128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 3)},
    attention_prefill_fp32={128: Tile(32, 32, 4, 1), 256: Tile(32, 16, 4, 1)},
    attention_decode={64: Tile(16, 64, 4, 5), 128: Tile(16, 64, 4, 5), 256: Tile(16, 32, 4, 5)},
    attention_decode_fp32={128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    gdn_decode=Tile(32, 256, 4, 1),
    gdn_state={64: Tile(64, 64, 4, 2), 128: Tile(128, 32, 4, 2), 256: Tile(256, 32, 4, 1)},
    gdn_state_fp32={64: Tile(64, 32, 8, 1), 128: Tile(128, 32, 8, 1), 256: Tile(256, 32, 8, 1)},
    gdn_intra=Tile(64, 64, 4, 1),
    gdn_output=Tile(64, 64, 4, 1),
    gdn_fp32_warps=8,
    conv1d=Tile(16, 256, 4, 1),
)

BY_NAME = {"NVIDIA H200": HOPPER}
BY_CAPABILITY = {(9, 0): HOPPER}


@cache
def device_configs(device: torch.device) -> Configs:
    """The tables of this device: by name, else by compute capability, else the small ones."""
    if device.type != "cuda":
        return SMALL
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    if properties.name in BY_NAME:
        chosen, why = BY_NAME[properties.name], "measured on this GPU"
    elif capability in BY_CAPABILITY:
        chosen, why = BY_CAPABILITY[capability], "measured on another GPU of this generation"
    else:
        chosen, why = SMALL, "not measured on this GPU; fits 96 KiB of shared memory"
    label = "Hopper" if chosen is HOPPER else "small"
    record("Triton tile tables", label, f"{why} ({properties.name})")
    return replace(chosen, multiprocessors=properties.multi_processor_count)


def pick(table: Table, head_dim: int) -> Tile:
    """The row for `head_dim`: the smallest key that holds it.

    Raises:
        ValueError: `head_dim` exceeds the widest supported tile.
    """
    for width in sorted(table):
        if head_dim <= width:
            return table[width]
    raise ValueError(f"head dimension {head_dim} exceeds the supported {max(table)}")
