# SPDX-License-Identifier: Apache-2.0
"""Gate, up projection and SiLU of many tokens as one launch on Hopper.

The tiles of the matmul (`csrc/cuda/hopper/swiglu.cu`) hold the gate and the up projection of the
same outputs, so what it writes is already activated: the two products never reach memory. All
shapes of tiles sum up k in the same order, so a row's bits follow from that row and the weight
alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.kernels.cuda_library import CudaOps, overlaps
from vllm.kernels.registry import Implementation
from vllm.kernels.triton.configs import device_configs
from vllm.utils.math_utils import cdiv

OPS = CudaOps(
    what="gated matmuls of many tokens",
    why="the products do not pass through memory to be activated",
    instead_of="cuBLAS, then Triton",
    chosen="vllm_cuda for bfloat16 without bias where it is faster",
)
#: elements of a 16-byte access
ALIGNMENT = 8
#: with as many tokens, results and outputs it is faster for every weight measured, `k` in a range
MANY_TOKENS = 512
RESULTS = 512 * 9216
OUTPUTS = 3072
COLUMNS = (1024, 4096)
#: as measured on an H200 with so many multiprocessors, busy with outputs for this share at least
MULTIPROCESSORS = 132
LEAST_USE = 0.8
#: about as many tokens keep their place in the L2 cache while the weight passes by
CACHED_TOKENS = 2048


@dataclass(frozen=True)
class Shape:
    """Of a tile, which a multiprocessor makes at once; `rows` by `columns` tiles make a cluster.

    `cost` of a tile's elements, relative to another shape's.
    """

    tokens: int
    outputs: int
    cost: float
    rows: int = 1
    columns: int = 1

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Clusters that cover `[m, n]`, by rows and columns."""
        return cdiv(m, self.tokens * self.rows), cdiv(n, self.outputs * self.columns)

    def time(self, m: int, n: int, multiprocessors: int) -> float:
        """Of the busiest multiprocessor, in arbitrary units."""
        rows, columns = self.grid(m, n)
        waves = cdiv(rows * columns, multiprocessors // (self.rows * self.columns))
        return waves * self.tokens * self.outputs * self.cost


#: as compiled, in the order in which `swiglu.cu` lists them; costs as measured on an H200
SHAPES = (
    Shape(128, 128, 1.0, rows=2),
    Shape(256, 72, 1.02, columns=2),
    Shape(128, 72, 1.03, columns=2),
)


def swiglu_launch(m: int, n: int, multiprocessors: int) -> tuple[int, int]:
    """Which shape, and how many rows of its clusters go through all columns together."""
    times = [shape.time(m, n, multiprocessors) for shape in SHAPES]
    variant = times.index(min(times))
    shape = SHAPES[variant]
    return variant, max(1, CACHED_TOKENS // (shape.tokens * shape.rows))


def swiglu(x: Tensor, weight: Tensor, overlap: bool) -> Tensor:
    """`[tokens, k], [2 n, k] -> [tokens, n]`, where `takes_swiglu`; `overlap`: the kernel may start
    before the kernels ahead of it have ended, none of which may then write the weight."""
    launch = swiglu_launch(len(x), len(weight) // 2, device_configs(x.device).multiprocessors)
    return torch.ops.vllm_cuda.swiglu.default(x, weight, overlap, *launch)


def is_faster(m: int, n: int, k: int) -> bool:
    """Whether one launch takes `[m, k]` and `[2 n, k]` faster than cuBLAS and then Triton."""
    if m < MANY_TOKENS or m * n < RESULTS or n < OUTPUTS or not COLUMNS[0] <= k <= COLUMNS[1]:
        return False
    shape = SHAPES[swiglu_launch(m, n, MULTIPROCESSORS)[0]]
    busy = shape.time(m, n, MULTIPROCESSORS) / shape.cost * MULTIPROCESSORS
    return m * n >= LEAST_USE * busy


def takes_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the op takes `x [tokens, k]`, `weight [2 n, k]` and `bias`, and is faster."""
    return (
        bias is None
        and x.dim() == 2
        and is_faster(len(x), len(weight) // 2, weight.shape[1])
        and x.dtype == weight.dtype == torch.bfloat16
        and len(weight) % (2 * ALIGNMENT) == 0
        and weight.is_contiguous()
        and all(
            tensor.stride(1) == 1
            and tensor.stride(0) % ALIGNMENT == 0
            and tensor.storage_offset() % ALIGNMENT == 0
            for tensor in (x, weight)
        )
    )


def _linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return swiglu(x, weight, overlaps())


linear_silu_and_mul = Implementation(_linear_silu_and_mul, takes_swiglu, OPS)
