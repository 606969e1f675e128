# SPDX-License-Identifier: Apache-2.0
"""Tensor descriptors: tiles that the hardware addresses (compute capability 9.0 and later)."""

from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16


@cache
def has_descriptors(device: torch.device) -> bool:
    """Whether kernels on this device can take descriptors; Triton's interpreter can."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def describable(x: Tensor) -> bool:
    """Whether `x [rows, heads, width]` (dense heads) starts and strides on 16-byte boundaries."""
    row_bytes = x.stride(0) * x.element_size()
    return x.data_ptr() % ALIGNMENT == 0 and row_bytes % ALIGNMENT == 0


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of `x [..., heads, width]` as a matrix with rows of `heads * width`, read in
    tiles of `rows x columns`."""
    matrix = x.flatten(1)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
