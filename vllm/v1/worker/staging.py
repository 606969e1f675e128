# SPDX-License-Identifier: Apache-2.0
"""Host arrays that travel to the device each step, without allocation or waiting."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class StagedArray:
    """A host array and its device twin.

    On CUDA the host side is pinned and kept `depth` times: the host may fill the array for step
    n + 1 while the copy of step n is still queued. `depth` must exceed the number of steps in
    flight. On CPU the host side is the device side.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, depth: int
    ) -> None:
        cuda = device.type == "cuda"
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=cuda) for _ in range(depth)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._device = torch.zeros(shape, dtype=dtype, device=device) if cuda else None
        self._turn = 0

    def next(self) -> np.ndarray:
        """The host array to fill for this step (its old contents are meaningless)."""
        self._turn = (self._turn + 1) % len(self._hosts)
        return self._arrays[self._turn]

    @property
    def array(self) -> np.ndarray:
        """The host array of this step."""
        return self._arrays[self._turn]

    def upload(self, *lengths: int) -> Tensor:
        """Queue the copy of the leading `lengths` of each dimension; returns the device view."""
        index = tuple(slice(n) for n in lengths)
        host = self._hosts[self._turn][index]
        if self._device is None:
            return host
        device = self._device[index]
        device.copy_(host, non_blocking=True)
        return device

    @property
    def device(self) -> Tensor:
        """The whole device tensor (fixed address; for graph capture)."""
        return self._hosts[self._turn] if self._device is None else self._device
