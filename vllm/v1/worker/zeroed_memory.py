# SPDX-License-Identifier: Apache-2.0
"""Zeroing new memory without touching all of it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor

#: below this, writing the zeros costs less than asking the system
_MIN_BYTES = 1 << 20
_PAGE = mmap.PAGESIZE


def new_zeros(num_bytes: int, device: torch.device) -> Tensor:
    """`uint8 [num_bytes]` of zeros. Raises `MemoryError` if there are not so many."""
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's own for devices is one
        reason = str(error).strip().splitlines()[0]
        raise MemoryError(f"{num_bytes / 2**30:.2f} GiB on {device}: {reason}") from error
    zero(memory)
    return memory


def zero(memory: Tensor) -> None:
    """Fill `uint8 [bytes]`, just allocated, with zeros.

    On Linux the pages of host memory are given back to the system, which has a zeroed one at hand
    when one is next used (madvise(2), MADV_DONTNEED of private anonymous memory, which allocators
    give out): gigabytes take no time, and no memory before they are used. Not where a device has
    locked them.
    """
    begin = memory.data_ptr()
    end = begin + len(memory)
    first, last = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
    in_reach = memory.device.type == "cpu" and sys.platform == "linux" and not memory.is_pinned()
    if in_reach and len(memory) >= _MIN_BYTES and _give_back(first, last - first):
        memory[: first - begin].zero_()
        memory[last - begin :].zero_()
    else:
        memory.zero_()


def _give_back(address: int, num_bytes: int) -> bool:
    """False where the system refuses: locked pages, or pages of another size."""
    return _madvise()(address, num_bytes, mmap.MADV_DONTNEED) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
