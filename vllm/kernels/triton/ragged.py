# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Tiles over a ragged batch whose lengths only the device knows.

With tiles of `BLOCK` rows, sequence `i` owns the tiles from `starts[i] // BLOCK + i`: at least
`ceil(length / BLOCK)` of them and never more than one too many, so the grid
`tokens // BLOCK + num_seqs` follows from host integers alone.
"""

import triton
import triton.language as tl


def num_tiles(tokens: int, num_seqs: int, block: int) -> int:
    """Tiles of `block` rows that cover any `num_seqs` sequences of `tokens` rows in all."""
    return tokens // block + num_seqs


@triton.jit
def find_sequence(starts_ptr, tile, num_seqs, BLOCK: tl.constexpr):
    """`(sequence, its tile index)` of a tile; the index may lie past the sequence's end."""
    low = 0
    high = num_seqs
    while high - low > 1:
        mid = (low + high) // 2
        if tl.load(starts_ptr + mid) // BLOCK + mid <= tile:
            low = mid
        else:
            high = mid
    return low, tile - (tl.load(starts_ptr + low) // BLOCK + low)
