# SPDX-License-Identifier: Apache-2.0
"""Sums through memory that GPUs of one host write to each other: `csrc/cuda/all_reduce.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.kernels.cuda_library import CudaOps, overlaps
from vllm.kernels.residual_stream import Norm

MAX_RANKS = 8
#: bytes that travel at once
ALIGNMENT = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: of a norm that is part of a sum
NORM_DTYPES = (torch.bfloat16, torch.float16)
#: columns of such a norm: more than the first and at most the second
NORM_COLUMNS = (512, 8192)
_HANDLE_BYTES = 64
#: ops of `vllm_cuda` that every rank has to call, or the others wait
COLLECTIVES = frozenset(
    {"peers_sum", "peers_sum_add_norm", "peers_push", "peers_signal", "peers_await"}
)

OPS = CudaOps(
    what="sums through peer memory",
    why="a word carries the number of its sum, so nothing waits for a flag or a fence",
    instead_of="NCCL",
    hopper_only=False,
)


def uses_two_shots(num_bytes: int, ranks: int) -> bool:
    """Whether each row of a message is better added up by one rank than by all.

    By all, a rank sends the message n - 1 times; by one, 2 (n - 1) / n times, but one rank waits
    for another twice. The second wait is worth about 300 kB at the rate of NVLink4.
    """
    return num_bytes * (ranks - 1) * (ranks - 2) > 300_000 * ranks


class PeerMemory:
    """One rank's inbox, and those of the other ranks as far as they are `open`.

    All ranks call the same sums in the same order, one after another. `capacity`: bytes of the
    largest message. A sum that waits for longer than `timeout_s` ends with an error of CUDA, after
    which the device cannot be used by this process. `first`: the number of the first sum, at least
    2, the same on all ranks. `push_bytes`: what the others can push to, see `PushedSums`.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        ranks: int,
        capacity: int,
        timeout_s: float,
        first: int = 2,
        push_bytes: int = 0,
    ) -> None:
        assert device.index is not None, "name the device by its index"
        self.rank, self.ranks, self.capacity = rank, ranks, capacity
        create = torch.ops.vllm_cuda.peers_create.default
        timeout_ms = max(1, int(timeout_s * 1000))
        self._device, self._push_bytes = device, push_bytes
        self._pushed: Tensor | None = None
        self._group: int = create(
            device.index, rank, ranks, capacity, push_bytes, timeout_ms, first
        )

    def export(self) -> bytes:
        """For `open` in another process."""
        handle = torch.empty(_HANDLE_BYTES, dtype=torch.uint8)
        torch.ops.vllm_cuda.peers_export.default(self._group, handle)
        return bytes(handle.tolist())

    def open(self, rank: int, handle: bytes) -> None:
        """Map the inbox of `rank`, which another process has exported. Raises RuntimeError where
        the devices cannot reach each other."""
        on_host = torch.tensor(list(handle), dtype=torch.uint8)
        torch.ops.vllm_cuda.peers_open.default(self._group, rank, on_host)

    def join(self, rank: int, other: PeerMemory) -> None:
        """Use the inbox of `rank`, which this process made: several ranks on one GPU, for tests."""
        torch.ops.vllm_cuda.peers_join.default(self._group, rank, other._group)

    def close(self) -> None:
        """Give the memory back; no sum may run. What was exported stays until the process ends,
        for the others may have it mapped."""
        group, self._group, self._pushed = self._group, 0, None
        torch.ops.vllm_cuda.peers_destroy.default(group)

    def sum(self, x: Tensor, two_shots: bool) -> Tensor:
        """The sum of the ranks' `x`, dense and of the same shape: see `naive.sum_ranks`."""
        rows = x.view(1, -1)
        out: Tensor = torch.ops.vllm_cuda.peers_sum.default(
            rows, self._group, two_shots, overlaps()
        )
        return out.view(x.shape)

    def sum_add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm, two_shots: bool
    ) -> tuple[Tensor, Tensor]:
        """See `naive.sum_ranks_add_norm`: `x` is this rank's part; all `[rows, columns]`."""
        normed, total = torch.ops.vllm_cuda.peers_sum_add_norm.default(
            x,
            residual,
            norm.weight,
            norm.eps,
            norm.one_plus,
            self._group,
            two_shots,
            overlaps(),
        )
        return normed, total

    def pushed(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """`[rows, columns]` of what the others push to, `offset` bytes from its first."""
        end = offset + rows * columns * dtype.itemsize
        if end > self._push_bytes:
            raise ValueError(f"bytes {offset} to {end} of {self._push_bytes}")
        if self._pushed is None:
            address: int = torch.ops.vllm_cuda.peers_address.default(self._group)
            self._pushed = torch.as_tensor(_Bytes(address, self._push_bytes), device=self._device)
        return self._pushed[offset:end].view(dtype).view(rows, columns)

    def push(self, rows: Tensor, receiver: int, offset: int) -> None:
        """Copy the dense `rows` to rank `receiver`, where `offset` is counted as in `pushed`."""
        torch.ops.vllm_cuda.peers_push.default(rows, self._group, receiver, offset)

    def signal(self, flag: int, value: int) -> None:
        """Tell all ranks, this one too, that what the stream has been given so far is there.
        `value` of a `flag` (0 to 31) increases by less than 2^31 from one call to the next."""
        torch.ops.vllm_cuda.peers_signal.default(self._group, flag, value)

    def wait_for(self, flag: int, value: int) -> None:
        """The stream goes on once all ranks have told this value or a later one."""
        torch.ops.vllm_cuda.peers_await.default(self._group, flag, value)


class _Bytes:
    """Memory of a device that no tensor owns, for torch to look at."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
