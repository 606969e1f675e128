# SPDX-License-Identifier: Apache-2.0
"""Matmuls of 17 to 256 tokens on Hopper: `csrc/cuda/hopper/narrow_linear.cu` where it beats cuBLAS.

A few output tiles leave most multiprocessors without one, so clusters of them share out the summed
dimension too. The bits of a row depend on the cut, which follows from the number of tokens, but not
on the other rows.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from vllm import decisions
from vllm.kernels.cuda_library import choose_cuda_ops
from vllm.kernels.linear_ops import LinearOps, can_read
from vllm.kernels.narrow_cuts import CUTS, narrow_cut

WHAT = "matmuls of 17 to 256 tokens"


class HopperNarrowOps:
    """`torch.ops.vllm_cuda.narrow_linear`."""

    @cached_property
    def _fitting(self) -> frozenset[int]:
        """The cuts whose clusters the current device runs at once; GPUs of a kind differ."""
        count, device = torch.ops.vllm_cuda.narrow_linear_clusters, torch.cuda.current_device()
        fitting = frozenset(i for i, cut in enumerate(CUTS) if count(i, device) >= cut.clusters)
        if len(fitting) < len(CUTS):
            why = "others need more clusters of CTAs at once than this GPU runs"
            taken = [CUTS[i].most_tokens for i in sorted(fitting)]
            decisions.record(f"cuts of {WHAT}", f"those of {taken} tokens", why, "all")
        return fitting

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        cut = narrow_cut(len(x), *weight.shape) if can_read(x, weight, bias) else None
        return cut is not None and cut in self._fitting

    def linear(
        self, x: Tensor, weight: Tensor, overlap: bool, *, residual: Tensor | None = None
    ) -> Tensor:
        cut = narrow_cut(len(x), *weight.shape)
        if cut is None:
            raise ValueError(
                f"no cut of the matmul suits {len(x)} tokens and a weight of"
                f" {tuple(weight.shape)}: use torch's linear"
            )
        out: Tensor = torch.ops.vllm_cuda.narrow_linear.default(x, weight, residual, overlap, cut)
        return out


def find_narrow_ops(capability: tuple[int, int]) -> LinearOps | None:
    """The ops for a device of this compute capability, or None; the choice is recorded."""
    found = choose_cuda_ops(
        WHAT,
        capability,
        why="clusters of multiprocessors share out few tiles without a second launch",
        instead_of="cuBLAS",
        hopper_only=True,
        chosen="vllm_cuda for bfloat16 and the sizes in narrow_cuts.py, cuBLAS for others",
    )
    return HopperNarrowOps() if found else None
