# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Inverse of a unit lower triangular 64 x 64 matrix, in registers.

`(I + A)^-1` by elimination in eight 8 x 8 diagonal blocks at once, then by joining neighbours:
`[[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]`, 8 -> 16 -> 32 -> 64. With `X` the block
diagonal of inverses and `L` the blocks below it, a join is `X - X L X`: whole-matrix products that
need no slices, which tiles in registers do not have. One pass of tf32 or 16 bits is visible in the
result, so products take split operands: three tf32 passes, or three bf16 passes (`SPLIT`), which
keep 16 bits of each factor, for results that are rounded to bf16.
"""

import triton
import triton.language as tl


@triton.jit
def _eliminate(D):
    """Inverses of the unit lower triangular blocks `I + D [8, 8, 8]`, column after column."""
    i = tl.arange(0, 8)[None, :, None]
    j = tl.arange(0, 8)[None, None, :]
    x = tl.where(i == j, 1.0, D * 0.0)
    for pivot in tl.static_range(7):
        column = tl.sum(tl.where(j == pivot, D, 0.0), axis=2, keep_dims=True)
        row = tl.sum(tl.where(i == pivot, x, 0.0), axis=1, keep_dims=True)
        x -= column * row
    return x


@triton.jit
def _join(x, A, SIZE: tl.constexpr, SPLIT: tl.constexpr):
    """Inverses of blocks of `2 SIZE` from those of `SIZE` on the diagonal of `x`."""
    block = tl.arange(0, 64) // SIZE
    below = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
    minus_L = tl.where(below, -A, 0.0)
    precision: tl.constexpr = "bf16x3" if SPLIT else "tf32x3"
    y = tl.dot(x, minus_L, input_precision=precision)
    return tl.dot(y, x, x, input_precision=precision)


@triton.jit
def invert_unit_lower(A, SPLIT: tl.constexpr):
    """`(I + A)^-1` of `A [64, 64]` fp32, zero on and above the diagonal."""
    blocks = tl.reshape(A, (8, 8, 8, 8))
    b = tl.arange(0, 8)
    diagonal = (b[:, None] == b[None, :])[:, None, :, None]
    x = _eliminate(tl.sum(tl.where(diagonal, blocks, 0.0), axis=2))
    x = tl.reshape(tl.where(diagonal, x[:, :, None, :], 0.0), (64, 64))
    return _join(_join(_join(x, A, 8, SPLIT), A, 16, SPLIT), A, 32, SPLIT)
