# SPDX-License-Identifier: Apache-2.0
"""Matmuls of 9 to 64 tokens on Hopper: `csrc/cuda/hopper/narrow.cu` where it beats cuBLAS.

They are bound by reading their weight once, as those of fewer tokens. How the kernel cuts up a
product follows from the weight's shape, not from the number of tokens: its bits for a row follow
from that row, the weight and its bias alone.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vllm.kernels.cuda_library import CudaOps, overlaps
from vllm.kernels.linear.skinny import ALIGNMENT, NORM_TOKENS, can_add
from vllm.kernels.linear.skinny import MAX_TOKENS as SKINNY_TOKENS
from vllm.kernels.registry import Implementation
from vllm.kernels.residual_stream import ResidualStream
from vllm.utils.math_utils import cdiv

#: fewer are the skinny matmul's, which takes their norm along
MIN_TOKENS, MAX_TOKENS = NORM_TOKENS + 1, 64
#: rows of the weight come in groups of so many, twice as many with a gate
GROUP = 8
#: of the weight that a tile has at most
MOST_ROWS = 256
# By the times of 12 weights of three models with 32 and 64 tokens on an H200, each cut with 5 x 4
# divisions of shared memory; these are within 5 % of the fastest.
#: rows of a tile with which a CTA does well alone
LEAST_ROWS = 72
#: about as many has each of many tiles, which leaves most of shared memory to what is under way
ROWS_OF_MANY = 128
#: CTAs that may share out a tile's columns
SPLITS = (1, 2, 4, 8)
#: of a weight, and beyond the skinny matmul's tokens of one that has at most a row for every two
#: columns, as routers have: cuBLAS shares out few tiles with long sums
LEAST_ELEMENTS, LEAST_OF_FEW_ROWS = 1 << 23, 1 << 18
KB = 1024

OPS = CudaOps(
    what="matmuls of 9 to 64 tokens",
    why="reads weights nearer to the memory's speed",
    instead_of="cuBLAS, or up to 16 tokens the skinny matmul",
    chosen="vllm_cuda for bfloat16 and weights from 16 MB on, from 512 kB where rows are few",
)


@dataclass(frozen=True)
class NarrowCut:
    """How `csrc/cuda/hopper/narrow.cu` cuts up a product.

    A tile has `rows` of the weight; `split` CTAs, a cluster, share out its columns. Of a CTA's
    `shared_bytes` of shared memory `token_bytes` hold tokens that are under way, and what partial
    sums leave of the others the weight.
    """

    rows: int
    split: int
    token_bytes: int = 48 * KB
    shared_bytes: int = 200 * KB

    @property
    def fields(self) -> tuple[int, int, int, int]:
        """As the op takes them."""
        return self.rows, self.split, self.token_bytes, self.shared_bytes


def narrow_cut(n: int, gated: bool, clusters: dict[int, int]) -> NarrowCut:
    """The cut for a weight of `n` rows; `clusters` of so many CTAs run at once.

    Tokens are fetched for each tile, so that few rows are shared out as high tiles of many CTAs.
    """
    split = 1
    if n < LEAST_ROWS * clusters[1]:
        split = max((s for s, count in clusters.items() if n <= MOST_ROWS * count), default=1)
    group = 2 * GROUP if gated else GROUP
    share = cdiv(n, clusters[split])
    tiles = 1 if share <= MOST_ROWS else cdiv(share, ROWS_OF_MANY)
    return NarrowCut(cdiv(cdiv(share, tiles), group) * group, split)


@cache
def cut_for(n: int, gated: bool, device: int) -> NarrowCut:
    """The cut for a weight of `n` rows on a device."""
    count = torch.ops.vllm_cuda.narrow_clusters.default
    return narrow_cut(n, gated, {split: count(split, device) for split in SPLITS})


def narrow_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, overlap: bool, *, residual: Tensor | None = None
) -> Tensor:
    """`[tokens, k], [n, k], [n] -> [tokens, n]`, rounded and then added to `residual [tokens, n]`.

    `overlap` lets the kernel fetch its weight while the kernels ahead of it still run, so none of
    those may write the weight.
    """
    return torch.ops.vllm_cuda.narrow_linear.default(
        x,
        weight,
        bias,
        residual,
        False,
        overlap,
        *cut_for(len(weight), False, x.get_device()).fields,
    )


def narrow_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None, overlap: bool) -> Tensor:
    """`[tokens, k], [2 n, k], [2 n] -> [tokens, n]`; the gate's rows of the weight come first."""
    cut = cut_for(len(weight), True, x.get_device())
    return torch.ops.vllm_cuda.narrow_linear.default(
        x, weight, bias, None, True, overlap, *cut.fields
    )


def is_narrow(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> bool:
    """Whether the kernel takes `x [tokens, k]`, `weight [n, k]` and `bias [n]`, and is faster."""
    n, k = weight.shape
    has_few_rows = 2 * n <= k and len(x) > SKINNY_TOKENS
    return (
        x.dim() == 2
        and MIN_TOKENS <= len(x) <= MAX_TOKENS
        and x.dtype == weight.dtype == torch.bfloat16
        and n * k >= (LEAST_OF_FEW_ROWS if has_few_rows else LEAST_ELEMENTS)
        and n % (2 * GROUP if gated else GROUP) == 0
        and k % ALIGNMENT == 0
        and weight.is_contiguous()
        and x.stride(1) == 1
        and x.stride(0) % ALIGNMENT == 0
        and x.stride(0) >= k
        and all(
            tensor is None or tensor.storage_offset() % ALIGNMENT == 0
            for tensor in (x, weight, bias)
        )
    )


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return is_narrow(x, weight, bias)


def _takes_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return is_narrow(x, weight, bias, gated=True)


def _takes_addition(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    return (
        is_narrow(x, weight, bias)
        and can_add(residual, x)
        and residual.storage_offset() % ALIGNMENT == 0
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return narrow_linear(x, weight, bias, overlaps())


def _linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return narrow_silu_and_mul(x, weight, bias, overlaps())


def _linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> ResidualStream:
    return ResidualStream(narrow_linear(x, weight, bias, overlaps(), residual=residual))


linear = Implementation(_linear, _takes, OPS)
linear_silu_and_mul = Implementation(_linear_silu_and_mul, _takes_silu_and_mul, OPS)
linear_add = Implementation(_linear_add, _takes_addition, OPS)
