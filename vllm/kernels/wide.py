# SPDX-License-Identifier: Apache-2.0
"""Matmuls of many tokens on Hopper: `csrc/cuda/hopper/wide_linear.cu` where it beats cuBLAS.

All tiles sum up k in the same order, so a row's bits follow from that row and the weight alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.kernels.cuda_library import choose_cuda_ops
from vllm.kernels.linear_ops import LinearOps, can_read
from vllm.kernels.wide_shapes import TILES, wide_tile

WHAT = "matmuls of many tokens"


class HopperWideOps:
    """`torch.ops.vllm_cuda.wide_linear`; see `LinearOps`."""

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return can_read(x, weight, bias) and wide_tile(len(x), *weight.shape) is not None

    def linear(
        self, x: Tensor, weight: Tensor, overlap: bool, *, residual: Tensor | None = None
    ) -> Tensor:
        tile = wide_tile(len(x), *weight.shape)
        if tile is None:
            raise ValueError(
                f"no tile of the matmul suits {len(x)} tokens and a weight of"
                f" {tuple(weight.shape)}: use torch's linear"
            )
        out: Tensor = torch.ops.vllm_cuda.wide_linear.default(
            x, weight, residual, overlap, tile, TILES[tile].group
        )
        return out


def find_wide_ops(capability: tuple[int, int]) -> LinearOps | None:
    """The ops for a device of this compute capability, or None; the choice is recorded."""
    found = choose_cuda_ops(
        WHAT,
        capability,
        why="its tiles fill the multiprocessors there, and it starts before the norm has ended",
        instead_of="cuBLAS",
        hopper_only=True,
        chosen="vllm_cuda for bfloat16 and the sizes in wide_shapes.py, cuBLAS for others",
    )
    return HopperWideOps() if found else None
