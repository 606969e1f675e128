# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Inverse of a unit lower triangular 64 x 64 matrix, in fp32.

`(I + A)^-1` by forward substitution in four 16 x 16 diagonal blocks, then by joining neighbours:
`[[P, 0], [A21, Q]]^-1 = [[P^-1, 0], [-Q^-1 A21 P^-1, Q^-1]]`, 16 -> 32 -> 64. Products stay in fp32
(ieee): tf32 is visible in the result. Tiles cannot be sliced in registers, so the blocks pass
through a scratch matrix that stays in the cache.
"""

import triton
import triton.language as tl


@triton.jit
def _block(base, row, col, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    return base + (row + i)[:, None] * 64 + (col + i)[None, :]


@triton.jit
def _join(base, row, SIZE: tl.constexpr):
    """Overwrite the block below the diagonal of the pair of `SIZE` blocks at `row`."""
    upper = tl.load(_block(base, row, row, SIZE))
    lower = tl.load(_block(base, row + SIZE, row + SIZE, SIZE))
    below = _block(base, row + SIZE, row, SIZE)
    product = tl.dot(lower, tl.load(below), input_precision="ieee")
    tl.store(below, -tl.dot(product, upper, input_precision="ieee"))


@triton.jit
def invert_unit_lower(base):
    """`base` points at a 64 x 64 fp32 matrix holding `A` below the diagonal and zeros elsewhere,
    written by this program; it is replaced by `(I + A)^-1` and returned as a tile."""
    tl.debug_barrier()
    b = tl.arange(0, 4)[:, None, None]
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    x = tl.where((i == j) & (b >= 0), 1.0, 0.0)
    corner = base + b * (16 * 64 + 16)
    for row in tl.static_range(1, 16):
        a = tl.load(corner + row * 64 + i)
        update = tl.sum(a * x, axis=1, keep_dims=True)
        x = tl.where(i == row, x - update, x)
    tl.debug_barrier()
    tl.store(corner + i * 64 + j, x)
    tl.debug_barrier()
    _join(base, 0, 16)
    _join(base, 32, 16)
    tl.debug_barrier()
    _join(base, 0, 32)
    tl.debug_barrier()
    return tl.load(_block(base, 0, 0, 64))
