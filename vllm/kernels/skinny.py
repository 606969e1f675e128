# SPDX-License-Identifier: Apache-2.0
"""Matmuls of few tokens on Hopper: `csrc/cuda/skinny.cu` where it beats cuBLAS.

At 1 to 16 tokens a matmul is bound by reading its weight once. The kernel's bits for a row follow
from that row, the weight and its bias alone: they do not depend on the other rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vllm.kernels.cuda_library import choose_cuda_ops
from vllm.kernels.residual_stream import Norm
from vllm.kernels.skinny_launch import skinny_launch

MAX_TOKENS = 16
#: columns of the weight must be a multiple of one step of the kernel's inner loop
COLUMN_STEP = 32
#: elements of a 16-byte access
ALIGNMENT = 8
DTYPES = (torch.bfloat16, torch.float16)
#: a norm has at most as many tokens: beyond, a launch of its own that shares out the rows is faster
NORM_TOKENS = 8
#: columns of a norm are more than the first and at most the second
NORM_COLUMNS = (512, 3072)
WHAT = "matmuls of 1 to 16 tokens"


class SkinnyOps(Protocol):
    """`x [tokens, k]`, `weight [n, k]`, `bias [n]` or None.

    `norm`: `x` goes through it first (where `can_normalise`). `overlap` lets the kernel fetch its
    weight while the kernels ahead of it still run, so none of those may write the weight.
    """

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: bool,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`-> [tokens, n]`, rounded and then added to `residual [tokens, n]` if that is given."""
        ...

    def linear_silu_and_mul(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: bool,
        *,
        norm: Norm | None = None,
    ) -> Tensor:
        """`-> [tokens, n / 2]`; the gate's rows of the weight come first."""
        ...


class HopperSkinnyOps:
    """`torch.ops.vllm_cuda.skinny_*`."""

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: bool,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        launch = skinny_launch(len(weight), gated=False, norm=norm is not None)
        out: Tensor = torch.ops.vllm_cuda.skinny_linear.default(
            x, *_fields(norm), weight, bias, residual, overlap, *launch.fields
        )
        return out

    def linear_silu_and_mul(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: bool,
        *,
        norm: Norm | None = None,
    ) -> Tensor:
        launch = skinny_launch(len(weight), gated=True, norm=norm is not None)
        out: Tensor = torch.ops.vllm_cuda.skinny_linear_silu_and_mul.default(
            x, *_fields(norm), weight, bias, overlap, *launch.fields
        )
        return out


def _fields(norm: Norm | None) -> tuple[Tensor | None, float, bool]:
    return (None, 0.0, False) if norm is None else (norm.weight, norm.eps, norm.one_plus)


def find_skinny_ops(capability: tuple[int, int]) -> SkinnyOps | None:
    """The ops for a device of this compute capability, or None; the choice is recorded."""
    found = choose_cuda_ops(
        WHAT,
        capability,
        why="reads weights nearer to the memory's speed",
        instead_of="cuBLAS",
        hopper_only=False,
    )
    return HopperSkinnyOps() if found else None


def is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether the ops take `x [tokens, k]` and `weight [n, k]` of one dtype."""
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= MAX_TOKENS
        and x.dtype in DTYPES
        and weight.shape[1] % COLUMN_STEP == 0
        and weight.is_contiguous()
        and weight.storage_offset() % ALIGNMENT == 0
        and x.stride(1) == 1
        and x.stride(0) % ALIGNMENT == 0
        and x.storage_offset() % ALIGNMENT == 0
    )


def can_add(residual: Tensor, x: Tensor) -> bool:
    """Whether `linear` adds `residual [tokens, n]` to the product of `x [tokens, k]`."""
    return residual.dtype == x.dtype and residual.is_contiguous()


def can_normalise(norm: Norm, x: Tensor) -> bool:
    """Whether the ops take `norm` of `x [tokens, k]` along."""
    weight = norm.weight
    return (
        len(x) <= NORM_TOKENS
        and NORM_COLUMNS[0] < x.shape[1] <= NORM_COLUMNS[1]
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and weight.storage_offset() % ALIGNMENT == 0
    )
