# SPDX-License-Identifier: Apache-2.0
"""Memory that ends where the process may not read: a kernel that goes past the end is stopped."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_NO_ACCESS = 0


def before_a_guard_page(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU; reading the byte behind its last one ends the process."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return tensor
    end = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(address + end)
    if libc.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), _NO_ACCESS) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=end - num_bytes
    )
    return copy.view(tensor.shape).copy_(tensor)
