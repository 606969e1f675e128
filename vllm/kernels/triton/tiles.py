# SPDX-License-Identifier: Apache-2.0
"""Tile sizes and launch parameters of the kernels, by what they depend on.

Tables are keyed by the padded head dimension; wider keys serve narrower heads. fp32 activations
have their own rows: twice the shared memory, and no tensor cores. Attention reads keys through the
block table, which takes every second pipeline stage: `2 n + 1` stages keep `n` key tiles in shared
memory.
"""

from dataclasses import dataclass


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
    """One GPU's tables; attention tiles are (query rows, keys), GDN tiles (keys dims, dv).

    Attention of short queries: `attention_decode_few` where sequences share the keys' heads among
    at most one program per multiprocessor, `attention_decode_many` where they are more than two.
    """

    multiprocessors: int
    attention_prefill: Table
    attention_prefill_fp32: Table
    attention_decode: Table
    attention_decode_few: Table
    attention_decode_many: Table
    attention_decode_fp32: Table
    gdn_decode: Tile
    gdn_state: Table
    gdn_state_fp32: Table
    gdn_intra: Tile
    gdn_fp32_warps: int
    conv1d: Tile


def pick(table: Table, head_dim: int) -> Tile:
    """The row for `head_dim`: the smallest key that holds it.

    Raises:
        ValueError: `head_dim` exceeds the widest supported tile.
    """
    for width in sorted(table):
        if head_dim <= width:
            return table[width]
    raise ValueError(f"head dimension {head_dim} exceeds the supported {max(table)}")
