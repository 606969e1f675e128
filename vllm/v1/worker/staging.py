# SPDX-License-Identifier: Apache-2.0
"""Host arrays that travel to the device each step, without allocation or waiting."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.utils.math_utils import cdiv

#: arrays of a flush: what a step has itself and what each of its state groups adds
_MOST_ARRAYS = 256


class Uploads:
    """Copies to a CUDA device that are queued together: one launch instead of one copy each.

    `depth` must exceed the number of flushes in flight; each takes at most `max_arrays`.
    """

    def __init__(self, max_arrays: int, depth: int) -> None:
        from vllm.kernels.triton.upload import COLUMNS, upload

        shape = (max_arrays, COLUMNS)
        self._tables = [
            torch.zeros(shape, dtype=torch.int64, pin_memory=True) for _ in range(depth)
        ]
        self._rows = [table.numpy() for table in self._tables]
        self._launch = upload
        self._turn = 0
        self._count = 0

    @classmethod
    def create(cls, device: torch.device, depth: int) -> Uploads | None:
        """For a runner with fewer than `depth` steps in flight; None on a CPU, whose arrays need
        not travel."""
        return cls(_MOST_ARRAYS, depth) if device.type == "cuda" else None

    def add(self, host: Tensor, device: Tensor) -> None:
        """Copy `host` to `device` at the next flush: one or two dimensions, the last dense, with
        the same strides. Rows are whole 4-byte words; of a vector of bytes the last word is copied
        as a whole, so both arrays must have room for it."""
        if host.numel() == 0:
            return
        size = host.element_size()
        rows, pitch = (1, 0) if host.dim() == 1 else (host.shape[0], host.stride(0) * size // 4)
        width = cdiv(host.shape[-1] * size, 4)
        entry = (host.data_ptr(), device.data_ptr(), width, rows, pitch)
        self._rows[self._turn][self._count] = entry
        self._count += 1

    def flush(self) -> None:
        """Queue the copies."""
        if not self._count:
            return
        self._launch(self._tables[self._turn], self._count)
        self._turn = (self._turn + 1) % len(self._tables)
        self._count = 0


class StagedArray:
    """A host array and its device twin.

    On CUDA the host side is pinned and kept `depth` times: the host may fill the array for step
    n + 1 while the copy of step n is still queued. `depth` must exceed the number of steps in
    flight. On CPU, where a launched step has ended, the host side is the device side. With
    `uploads`, copies wait for its flush.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        depth: int,
        uploads: Uploads | None = None,
    ) -> None:
        cuda = device.type == "cuda"
        copies = depth if cuda else 1
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=cuda) for _ in range(copies)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._device = torch.zeros(shape, dtype=dtype, device=device) if cuda else None
        self._turn = 0
        #: None: each copy is queued at once
        self.uploads = uploads

    def next(self) -> np.ndarray:
        """The host array to fill for this step (its old contents are meaningless)."""
        self._turn = (self._turn + 1) % len(self._hosts)
        return self._arrays[self._turn]

    @property
    def array(self) -> np.ndarray:
        """The host array of this step."""
        return self._arrays[self._turn]

    def upload(self, *lengths: int) -> Tensor:
        """Copy the leading `lengths` of each dimension; returns the device view."""
        index = tuple(slice(n) for n in lengths)
        host = self._hosts[self._turn][index]
        if self._device is None:
            return host
        device = self._device[index]
        if self.uploads is None:
            if not host.is_contiguous():
                raise ValueError("a part of several rows would be copied synchronously")
            device.copy_(host, non_blocking=True)
        else:
            self.uploads.add(host, device)
        return device

    @property
    def device(self) -> Tensor:
        """The whole device tensor (fixed address; for graph capture)."""
        return self._hosts[self._turn] if self._device is None else self._device
