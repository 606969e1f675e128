# SPDX-License-Identifier: Apache-2.0
"""Collectives of some processes of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.device_communicators.peer_sums import PeerPart, PeerSums
from vllm.distributed.device_communicators.pushed_sums import PushedSums
from vllm.utils.waiting import waiting_for

try:
    from torch.distributed import all_gather_single
except ImportError:  # torch < 2.13, whose name for it is deprecated
    from torch.distributed import all_gather_into_tensor as all_gather_single


@dataclass
class Process:
    """Of this process: where its collectives run, and whether they leave communication out (see
    `parallel_state.without_communication`)."""

    device: torch.device = torch.device("cpu")
    communicates_not: bool = False


PROCESS = Process()


@dataclass(frozen=True)
class GroupCoordinator:
    """Processes that share collectives: global `ranks`, this process's `rank_in_group`.

    `device_group` is torch's handle, None for a group of one; `peer_sums`: see `share_memory`.
    """

    ranks: tuple[int, ...]
    rank_in_group: int
    device_group: dist.ProcessGroup | None = field(default=None, compare=False)
    peer_sums: PeerSums | None = field(default=None, compare=False)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.ranks[self.rank_in_group]

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def all_reduce(self, x: Tensor, in_place: bool = False) -> Tensor:
        """The sum over the group; `x` itself when the group is one process. With `in_place` the
        sum may be in `x`.

        On a CPU more than two are added in rank order, so that an element's bits do not depend on
        what else the tensor holds: the library's order follows its size. On GPUs small sums have
        that order, too, where ranks share memory; else it is NCCL's, the same on all ranks; two
        have only one.
        """
        if self.world_size == 1 or PROCESS.communicates_not:
            return x
        if self.peer_sums is not None and self.peer_sums.takes(x):
            return self.peer_sums.sum(x)
        if self.world_size == 2 or x.device.type != "cpu":
            reuse = in_place and x.is_contiguous()
            total = x if reuse else x.clone(memory_format=torch.contiguous_format)
            with self._waiting("all-reduce"):
                dist.all_reduce(total, group=self.device_group)
            return total
        first, *others = self._gathered(x)
        for other in others:
            first += other
        return first

    def part_before_norm(self, x: Tensor, residual: Tensor) -> PeerPart | None:
        """`x` as this rank's part of a branch of the residual stream, which the norm after it adds
        up; None where `all_reduce` has to come first."""
        peers = None if PROCESS.communicates_not else self.peer_sums
        return PeerPart(x, peers) if peers is not None and peers.takes_norm(x, residual) else None

    @property
    def pushed_sums(self) -> PushedSums | None:
        """Who adds up this rank's part of a product that it `takes` while it is computed; after
        others comes `part_before_norm` or `all_reduce`."""
        peers = None if PROCESS.communicates_not else self.peer_sums
        return None if peers is None else peers.pushed

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The group's tensors concatenated along `dim` in rank order."""
        if self.world_size == 1:
            return x
        if dim == 0 and not PROCESS.communicates_not:
            whole = x.new_empty(self.world_size * len(x), *x.shape[1:])
            with self._waiting("all-gather"):
                all_gather_single(whole, x.contiguous(), group=self.device_group)
            return whole
        return torch.cat(self._gathered(x), dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Of the sum over the group of `x [ranks * rows, ...]`, this rank's `[rows, ...]`.

        Each rank sends the others their parts, which are added in rank order in fp32 (or what is
        wider) and rounded once: an element's bits do not depend on what else `x` holds.
        """
        if self.world_size == 1:
            return x
        if PROCESS.communicates_not:
            return x[: len(x) // self.world_size]
        parts = torch.empty_like(x, memory_format=torch.contiguous_format)
        with self._waiting("reduce-scatter"):
            dist.all_to_all_single(parts, x.contiguous(), group=self.device_group)
        first, *others = parts.chunk(self.world_size)
        total = first.to(torch.promote_types(x.dtype, torch.float32))
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        if PROCESS.communicates_not:
            return [x] * self.world_size
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in self.ranks]
        with self._waiting("all-gather"):
            dist.all_gather(parts, x.contiguous(), group=self.device_group)
        return parts

    def all_agree(self, opinion: bool) -> bool:
        """Whether every process of the group says so. Waits for the others and the device, so no
        step may ask."""
        if self.world_size == 1:
            return opinion
        vote = torch.tensor(int(opinion), device=PROCESS.device)
        with self._waiting("vote"):
            dist.all_reduce(vote, dist.ReduceOp.MIN, group=self.device_group)
            return bool(vote.item())

    def isend(self, x: Tensor, target: int) -> dist.Work:
        """Begin to send the contiguous `x` to the group's `target`-th process. `x` may be written
        once `wait()` of the result has returned or, on a GPU, on the stream that called it."""
        work = dist.isend(x, self.ranks[target], group=self.device_group)
        assert work is not None, "this process is in the group"
        return work

    def irecv(self, x: Tensor, source: int) -> dist.Work:
        """Begin to receive the contiguous `x` from the group's `source`-th process. It is there
        once `wait()` of the result has returned or, on a GPU, on the stream that called it."""
        work = dist.irecv(x, self.ranks[source], group=self.device_group)
        assert work is not None, "this process is in the group"
        return work

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Send contiguous tensors to the group's processes and fill others from them, all at once;
        what two processes send each other arrives in the order in which it is sent. When this has
        returned, or on a GPU on the stream that called it, all is there."""
        group = self.device_group
        works = [dist.P2POp(dist.isend, x, self.ranks[rank], group) for x, rank in sends]
        works += [dist.P2POp(dist.irecv, x, self.ranks[rank], group) for x, rank in receives]
        with self._waiting("exchange"):
            for work in dist.batch_isend_irecv(works) if works else ():
                work.wait()

    def barrier(self) -> None:
        """Wait until every process of the group is here."""
        if self.world_size > 1:
            index = PROCESS.device.index
            devices = None if index is None else [index]
            with self._waiting("barrier"):
                dist.barrier(group=self.device_group, device_ids=devices)

    def _waiting(self, what: str) -> waiting_for:
        return waiting_for(what, self.ranks)
