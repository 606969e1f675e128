# SPDX-License-Identifier: Apache-2.0
"""What matmuls of `vllm_cuda` that stand in for cuBLAS at some sizes have in common."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

#: elements of a 16-byte access
ALIGNMENT = 8


class LinearOps(Protocol):
    """Of `x [tokens, k]` and `weight [n, k]`, bfloat16, without bias."""

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether `linear` multiplies these."""
        ...

    def linear(
        self, x: Tensor, weight: Tensor, overlap: bool, *, residual: Tensor | None = None
    ) -> Tensor:
        """`-> [tokens, n]`, rounded and then added to `residual [tokens, n]` if that is given.

        `overlap` lets the kernel fetch its weight while the kernels ahead of it still run, so none
        of those may write the weight.
        """
        ...


def can_read(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel reads `x [tokens, k]` and `weight [n, k]` of one dtype, but for sizes."""
    return (
        bias is None
        and x.dim() == 2
        and x.dtype is torch.bfloat16
        and weight.is_contiguous()
        and weight.storage_offset() % ALIGNMENT == 0
        and x.stride(1) == 1
        and x.stride(0) % ALIGNMENT == 0
        and x.storage_offset() % ALIGNMENT == 0
    )
