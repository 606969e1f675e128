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
COLLECTIVES = frozenset({"peers_sum", "peers_sum_add_norm"})

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
    2, the same on all ranks.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        ranks: int,
        capacity: int,
        timeout_s: float,
        first: int = 2,
    ) -> None:
        assert device.index is not None, "name the device by its index"
        self.rank, self.ranks, self.capacity = rank, ranks, capacity
        create = torch.ops.vllm_cuda.peers_create.default
        timeout_ms = max(1, int(timeout_s * 1000))
        self._group: int = create(device.index, rank, ranks, capacity, timeout_ms, first)

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
        group, self._group = self._group, 0
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
