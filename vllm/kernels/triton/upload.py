# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Several small host arrays to the device in one launch, read straight from pinned memory."""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.launcher import Launcher

#: a table row: host address, device address, 4-byte words per row, rows, words between rows
COLUMNS = 5
PROGRAMS_PER_ARRAY = 16
WORDS = 1024


@triton.jit
def _upload_kernel(table_ptr, COLUMNS: tl.constexpr, WORDS: tl.constexpr):
    """Grid (arrays, programs): row `i` of the table says what array `i` is and where it goes."""
    row = table_ptr + tl.program_id(0) * COLUMNS
    source = tl.load(row).to(tl.pointer_type(tl.int32))
    target = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    width = tl.load(row + 2)
    total = width * tl.load(row + 3)
    pitch = tl.load(row + 4)
    first = tl.program_id(1) * WORDS
    step = tl.num_programs(1) * WORDS
    for start in range(first, total, step):
        word = start + tl.arange(0, WORDS)
        place = word // width * pitch + word % width
        tl.store(target + place, tl.load(source + place, mask=word < total), mask=word < total)


_upload = Launcher(_upload_kernel)


def upload(table: Tensor, num_arrays: int) -> None:
    """Copy the first `num_arrays` arrays of `table [n, COLUMNS]` int64, itself in pinned memory.

    Source and target of an array have the same layout: a dense row of `width` words, `rows` times,
    `pitch` words apart.
    """
    _upload[(num_arrays, PROGRAMS_PER_ARRAY)](table, COLUMNS=COLUMNS, WORDS=WORDS)
