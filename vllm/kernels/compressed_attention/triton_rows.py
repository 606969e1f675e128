# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Where a sequence's rows lie, on GPUs: see `PagedRows`."""

import triton
import triton.language as tl

#: arguments of kernels that follow from a step's batch. So do the addresses of tables and
#: positions, which are slices that begin at any request or token.
VARYING_NUMBERS = ("query_len", "columns", "entry_columns", "stride_table", "stride_entry_table")


@triton.jit
def block_of(table, index, columns, BLOCK_SIZE: tl.constexpr):
    """The blocks, int64, of rows `index`; 0 past the `columns` of a sequence's `table`."""
    column = index // BLOCK_SIZE
    return tl.load(table + column, mask=column < columns, other=0).to(tl.int64)


@triton.jit
def load_rows(
    cache, table, index, wanted, columns, stride_block,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows `index [n]`, `[n, BLOCK_D]`, 0 where not `wanted` or nobody's, and where they are."""
    block = block_of(table, tl.where(wanted, index, 0), columns, BLOCK_SIZE)
    held = wanted & (block > 0)
    d = tl.arange(0, BLOCK_D)
    row = block * stride_block + (index % BLOCK_SIZE) * WIDTH
    mask = held[:, None] & (d < WIDTH)[None, :]
    return tl.load(cache + row[:, None] + d[None, :], mask=mask, other=0.0), held
