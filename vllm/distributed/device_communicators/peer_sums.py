# SPDX-License-Identifier: Apache-2.0
"""Small sums over the GPUs of one host, through memory that they write to each other."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from vllm import decisions
from vllm.distributed.device_communicators.pushed_sums import (
    PIECES,
    SMALLEST,
    DeviceLane,
    LargestSum,
    PushedSums,
)
from vllm.kernels.all_reduce.cuda import (
    ALIGNMENT,
    DTYPES,
    MAX_RANKS,
    NORM_COLUMNS,
    NORM_DTYPES,
    OPS,
    PeerMemory,
    uses_two_shots,
)
from vllm.kernels.residual_stream import Norm

#: bytes of the largest message: larger ones are NCCL's, which sends each byte once
LARGEST = 512 * 1024
#: as long as torch lets NCCL wait
_TIMEOUT_S = 600.0
_WHAT = "all-reduce of small messages"
_WHAT_IS_PUSHED = "all-reduce of large products"


class PeerSums:
    """Sums of messages that `takes` them; see `PeerMemory` for what ranks have to do alike.
    `pushed`: of large products, None where these are NCCL's."""

    def __init__(self, memory: PeerMemory, pushed: PushedSums | None = None) -> None:
        self._memory, self.pushed = memory, pushed

    def takes(self, x: Tensor) -> bool:
        """Whether the sum of such tensors travels here: the same on all ranks."""
        return x.dtype in DTYPES and _travels(x)

    def takes_norm(self, x: Tensor, residual: Tensor) -> bool:
        """Whether `sum_add_norm` takes a part and a residual stream like these."""
        return (
            x.dim() == 2
            and x.dtype in NORM_DTYPES
            and residual.dtype == x.dtype
            and NORM_COLUMNS[0] < x.shape[1] <= NORM_COLUMNS[1]
            and x.shape[1] * x.element_size() % ALIGNMENT == 0
            and _travels(x)
            and _travels(residual)
        )

    def sum(self, x: Tensor) -> Tensor:
        """A fresh tensor, on every rank with the same bits: added in fp32 in the order of ranks."""
        return self._memory.sum(x, uses_two_shots(x.nbytes, self._memory.ranks))

    def sum_add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """`(norm(s), s)` with `s = sum(x) + residual`, with the bits of the separate ops."""
        two_shots = uses_two_shots(x.nbytes, self._memory.ranks)
        return self._memory.sum_add_norm(x, residual, norm, two_shots)

    def close(self) -> None:
        """Unmap the others' memory; no sum may run."""
        self._memory.close()


@dataclass(frozen=True)
class PeerPart:
    """This rank's `part [tokens, n]` of a branch: see `BranchParts`."""

    part: Tensor
    sums: PeerSums

    def sum(self) -> Tensor:
        return self.sums.sum(self.part)

    def sum_add_norm(self, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return self.sums.sum_add_norm(self.part, residual, norm)


def _travels(x: Tensor) -> bool:
    return (
        x.is_cuda
        and 0 < x.nbytes <= LARGEST
        and x.nbytes % ALIGNMENT == 0
        and x.is_contiguous()
        and x.data_ptr() % ALIGNMENT == 0
    )


@dataclass(frozen=True)
class _Introduction:
    """What a rank tells the others: its host and GPU, its exported inbox or why it has none."""

    host: str
    gpu: str
    handle: bytes
    obstacle: str


def connect_peers(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout_s: int | None,
    largest: LargestSum | None = None,
) -> PeerSums | None:
    """Map the inboxes of the group's `ranks` processes, of which this is `rank`; None where they
    cannot all reach each other, as the decision says. `largest`: of products whose sums may be
    pushed. A collective call, before any capture."""
    if largest is not None and (why := _obstacle_to_pushes(largest, ranks)):
        decisions.record(_WHAT_IS_PUSHED, "NCCL", why, "copy engines")
        largest = None
    push_bytes = 0 if largest is None else largest.push_bytes
    memory, obstacle = _own_memory(rank, ranks, device, timeout_s, push_bytes)
    handle = b"" if memory is None else memory.export()
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    own = _Introduction(_host(), gpu, handle, obstacle)
    all_of_them: list[_Introduction] = [own] * ranks
    dist.all_gather_object(all_of_them, own, group)
    obstacle = _obstacle(own, all_of_them, device)
    if memory is not None and not obstacle:
        obstacle = _open_all(memory, all_of_them)
    obstacles = [obstacle] * ranks
    dist.all_gather_object(obstacles, obstacle, group)
    found = next((one for one in obstacles if one), None)
    if found is None:
        assert memory is not None
        why = "small sums wait for one way between GPUs, and need no launch of their own norm"
        decisions.record(_WHAT, f"peer memory, up to {LARGEST // 1024} kB", why, "NCCL")
        return PeerSums(memory, _pushed(memory, largest, device))
    if memory is not None:
        memory.close()
    decisions.record(_WHAT, "NCCL", found, "peer memory")
    if largest is not None:
        decisions.record(_WHAT_IS_PUSHED, "NCCL", found, "copy engines")
    return None


def _pushed(
    memory: PeerMemory, largest: LargestSum | None, device: torch.device
) -> PushedSums | None:
    if largest is None:
        return None
    decisions.record(
        _WHAT_IS_PUSHED,
        f"copy engines, from {SMALLEST // 2**20} MiB",
        f"rows are pushed in {PIECES} pieces while the next one is multiplied; "
        f"{largest.push_bytes / 1e6:.0f} MB on each GPU",
        "NCCL",
    )
    return PushedSums(memory, DeviceLane(device), largest)


def _obstacle_to_pushes(largest: LargestSum, ranks: int) -> str:
    """Why large products are not pushed; '' where they are."""
    if ranks != 2:
        return f"{ranks} ranks: one that pushed its part to all others would send it several times"
    if not largest.is_worth_pushing:
        return (
            f"of steps of {largest.rows} tokens they have {largest.num_bytes / 2**20:.1f} MiB at "
            f"most: copies are for {SMALLEST // 2**20} and more, of rows of 16-byte words"
        )
    return ""


def _own_memory(
    rank: int, ranks: int, device: torch.device, timeout_s: int | None, push_bytes: int
) -> tuple[PeerMemory | None, str]:
    """This rank's inbox, or why it has none."""
    if ranks > MAX_RANKS:
        return None, f"{ranks} ranks share sums; peer memory is for at most {MAX_RANKS}"
    if not OPS.choose(torch.cuda.get_device_capability(device)):
        return None, "the compiled ops do not run here, see the decision on sums"
    seconds = _TIMEOUT_S if timeout_s is None else timeout_s
    return PeerMemory(device, rank, ranks, LARGEST, seconds, push_bytes=push_bytes), ""


def _obstacle(own: _Introduction, others: Sequence[_Introduction], device: torch.device) -> str:
    """Why these ranks cannot use each other's memory, as far as this one can tell; '' if so."""
    for other in others:
        if other.obstacle:
            return other.obstacle
        if other.host != own.host:
            return "the ranks are on several hosts"
    visible = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    for other in others:
        index = visible.get(other.gpu)
        if other.gpu == own.gpu or index is None:
            continue
        if not torch.cuda.can_device_access_peer(device, index):
            return f"{device} has no peer access to the GPU of another rank, cuda:{index}"
    return ""


def _open_all(memory: PeerMemory, others: Sequence[_Introduction]) -> str:
    """Why a rank's memory cannot be mapped; '' when all are."""
    for rank, other in enumerate(others):
        if rank == memory.rank:
            continue
        try:
            memory.open(rank, other.handle)
        except RuntimeError as error:
            return f"the memory of rank {rank} cannot be mapped: {error}"
    return ""


def _host() -> str:
    """Of one boot of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()
