# SPDX-License-Identifier: Apache-2.0
"""Matmuls of few tokens on Hopper: `csrc/cuda/skinny.cu` where it beats cuBLAS.

At 1 to 16 tokens a matmul is bound by reading its weight once; those of more than 8 by large
weights are `narrow.py`'s. The kernel's bits for a row follow from that row, the weight and its bias
alone: they do not depend on the other rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.kernels.cuda_library import CudaOps, overlaps
from vllm.kernels.registry import Implementation
from vllm.kernels.residual_stream import Norm, ResidualStream

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
KB = 1024

OPS = CudaOps(
    what="matmuls of 1 to 16 tokens",
    why="reads weights nearer to the memory's speed",
    instead_of="cuBLAS",
    hopper_only=False,
)


@dataclass(frozen=True)
class SkinnyLaunch:
    """Which compiled variant of `csrc/cuda/skinny.cu` runs, and how it fills an SM.

    `ring_bytes` of a CTA's shared memory hold weights that are under way.
    """

    variant: int
    ring_bytes: int
    ctas_per_sm: int

    @property
    def fields(self) -> tuple[int, int, int]:
        """As the ops take them."""
        return self.variant, self.ring_bytes, self.ctas_per_sm


# Each within 1 % of the fastest of about 120 launches, by the time of a quarter of Qwen3.5-4B's
# decode step on an H200 (132 SMs, 227 KB of shared memory each) at 1, 8 and 16 tokens together.
# All variants add up a row in the same order, so results do not depend on the choice.

#: at most 16 weight rows at once
MANY_ROWS = SkinnyLaunch(variant=0, ring_bytes=150 * KB, ctas_per_sm=1)
#: all rows of an SM at once, at most 24
FEW_ROWS = SkinnyLaunch(variant=1, ring_bytes=102 * KB, ctas_per_sm=1)
FEW = 24 * 132


def skinny_launch(n: int, gated: bool, norm: bool) -> SkinnyLaunch:
    """The launch for a weight of `n` rows; `gated`: gate and up projection, fused with SiLU;
    `norm`: of what it multiplies, which only one variant holds whole."""
    return FEW_ROWS if n <= FEW and not gated and not norm else MANY_ROWS


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    overlap: bool,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`[tokens, k], [n, k], [n] -> [tokens, n]`, rounded and then added to `residual [tokens, n]`.

    `x` goes through `norm` first (where `can_normalise`). `overlap` lets the kernel fetch its
    weight while the kernels ahead of it still run, so none of those may write the weight.
    """
    launch = skinny_launch(len(weight), gated=False, norm=norm is not None)
    return torch.ops.vllm_cuda.skinny_linear.default(
        x, *_fields(norm), weight, bias, residual, overlap, *launch.fields
    )


def skinny_silu_and_mul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    overlap: bool,
    *,
    norm: Norm | None = None,
) -> Tensor:
    """`[tokens, k], [2 n, k], [2 n] -> [tokens, n]`; the gate's rows of the weight come first."""
    launch = skinny_launch(len(weight), gated=True, norm=norm is not None)
    return torch.ops.vllm_cuda.skinny_linear_silu_and_mul.default(
        x, *_fields(norm), weight, bias, overlap, *launch.fields
    )


def _fields(norm: Norm | None) -> tuple[Tensor | None, float, bool]:
    return (None, 0.0, False) if norm is None else (norm.weight, norm.eps, norm.one_plus)


def is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes `x [tokens, k]` and `weight [n, k]` of one dtype."""
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
    """Whether the kernel adds `residual [tokens, n]` to the product of `x [tokens, k]`."""
    return residual.dtype == x.dtype and residual.is_contiguous()


def can_normalise(norm: Norm, x: Tensor) -> bool:
    """Whether the kernel takes `norm` of `x [tokens, k]` along."""
    weight = norm.weight
    return (
        len(x) <= NORM_TOKENS
        and NORM_COLUMNS[0] < x.shape[1] <= NORM_COLUMNS[1]
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and weight.storage_offset() % ALIGNMENT == 0
    )


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return is_skinny(x, weight)


def _takes_addition(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    return is_skinny(x, weight) and can_add(residual, x)


def _takes_norm(stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None) -> bool:
    """Of a stream that is added up already."""
    x = stream.residual
    return stream.branch is None and is_skinny(x, weight) and can_normalise(norm, x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return skinny_linear(x, weight, bias, overlaps())


def _linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return skinny_silu_and_mul(x, weight, bias, overlaps())


def _linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> ResidualStream:
    return ResidualStream(skinny_linear(x, weight, bias, overlaps(), residual=residual))


def _norm_linear(
    stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = stream.residual
    return skinny_linear(x, weight, bias, overlaps(), norm=norm), x


def _norm_linear_silu_and_mul(
    stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = stream.residual
    return skinny_silu_and_mul(x, weight, bias, overlaps(), norm=norm), x


linear = Implementation(_linear, _takes, OPS)
linear_silu_and_mul = Implementation(_linear_silu_and_mul, _takes, OPS)
linear_add = Implementation(_linear_add, _takes_addition, OPS)
norm_linear = Implementation(_norm_linear, _takes_norm, OPS)
norm_linear_silu_and_mul = Implementation(_norm_linear_silu_and_mul, _takes_norm, OPS)
