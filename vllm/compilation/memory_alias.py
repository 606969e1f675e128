# SPDX-License-Identifier: Apache-2.0
"""Tensors that look at device memory without keeping it.

What a graph computes lies in its memory pool at a fixed address for as long as the graph lives.
Holding on to such a tensor would keep later captures from reusing its bytes; an alias does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _DeviceBytes:
    """A byte range as the CUDA array interface (version 3) describes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def alias_memory(tensor: Tensor) -> Tensor:
    """The same elements at the same address, with the same strides; owns nothing.

    The caller sees to it that the memory outlives the alias.
    """
    if tensor.numel() == 0 or not tensor.is_cuda:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    source = _DeviceBytes(tensor.data_ptr(), extent * tensor.element_size())
    raw = torch.as_tensor(source, device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
