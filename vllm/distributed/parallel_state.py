# SPDX-License-Identifier: Apache-2.0
"""The process groups of one engine and this process's place in them.

Until `initialize_model_parallel` runs, every group holds this process alone, so a layer built
outside an engine is an unsharded layer.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.device_communicators.peer_sums import PeerPart, PeerSums, connect_peers
from vllm.distributed.rendezvous import store_of
from vllm.distributed.utils import ensure_divisibility
from vllm.utils.waiting import waiting_for


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
        if self.world_size == 1 or _groups.communicates_not:
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
        peers = None if _groups.communicates_not else self.peer_sums
        return PeerPart(x, peers) if peers is not None and peers.takes_norm(x, residual) else None

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The group's tensors concatenated along `dim` in rank order."""
        if self.world_size == 1:
            return x
        if dim == 0 and not _groups.communicates_not:
            whole = x.new_empty(self.world_size * len(x), *x.shape[1:])
            with self._waiting("all-gather"):
                dist.all_gather_into_tensor(whole, x.contiguous(), group=self.device_group)
            return whole
        return torch.cat(self._gathered(x), dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Of the sum over the group of `x [ranks * rows, ...]`, this rank's `[rows, ...]`.

        Each rank sends the others their parts, which are added in rank order in fp32 (or what is
        wider) and rounded once: an element's bits do not depend on what else `x` holds.
        """
        if self.world_size == 1:
            return x
        if _groups.communicates_not:
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
        if _groups.communicates_not:
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
        vote = torch.tensor(int(opinion), device=_groups.device)
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
            index = _groups.device.index
            devices = None if index is None else [index]
            with self._waiting("barrier"):
                dist.barrier(group=self.device_group, device_ids=devices)

    def _waiting(self, what: str) -> waiting_for:
        return waiting_for(what, self.ranks)


_SOLO = GroupCoordinator(ranks=(0,), rank_in_group=0)


@dataclass
class _Groups:
    world: GroupCoordinator = _SOLO
    tp: GroupCoordinator = _SOLO
    pp: GroupCoordinator = _SOLO
    pp_back: GroupCoordinator = _SOLO
    dp: GroupCoordinator = _SOLO
    #: of the world, of tensor-parallel groups and of pipelines, once there are groups inside
    sizes: tuple[int, int, int] | None = None
    #: where this process's collectives run
    device: torch.device = torch.device("cpu")
    #: see `without_communication`
    communicates_not: bool = False


_groups = _Groups()


def init_distributed_environment(
    world_size: int = 1,
    rank: int = 0,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "nccl",
    timeout_s: int | None = None,
    has_collectives: bool = True,
) -> None:
    """Join the world of `world_size` processes; a world of one needs no process group.

    `distributed_init_method`: torch's, or that of a `MeetingPlace`. `local_rank` is the CUDA
    device index of this process, -1 for `rank`. `timeout_s`: longest wait
    of a collective, torch's own default for None. `has_collectives`: whether all processes share
    collectives of steps, so that on GPUs the group is bound to the device and connected at once. A
    bound group has one channel for all its messages, which would wait for each other, so the world
    of a pipeline is none; its tensor-parallel groups are.
    """
    if world_size == 1:
        _groups.world = _SOLO
        return
    if backend == "nccl":
        _groups.device = torch.device("cuda", rank if local_rank < 0 else local_rank)
        torch.cuda.set_device(_groups.device)
    if not dist.is_initialized():
        store = store_of(distributed_init_method, timeout_s)
        dist.init_process_group(
            backend,
            init_method=distributed_init_method if store is None else None,
            store=store,
            world_size=world_size,
            rank=rank,
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
            device_id=_bound_device() if has_collectives else None,
        )
    _groups.world = GroupCoordinator(tuple(range(world_size)), rank, dist.group.WORLD)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1
) -> None:
    """Split the world: consecutive ranks share a tensor-parallel group, strided ones a pipeline.

    A world of several times as many ranks is as many replicas, one after the other; ranks of the
    same place in theirs are a group, too. A world that is split like this already keeps its groups.
    Raises ValueError when the sizes do not divide the world.
    """
    world = _groups.world
    tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
    ensure_divisibility(world.world_size, tp * pp)
    sizes = world.world_size, tp, pp
    if _groups.sizes == sizes:
        return
    rows = [range(i, i + tp) for i in range(0, world.world_size, tp)]
    _groups.tp = _own_group(rows, has_collectives=True)
    span = tp * pp
    columns = [
        range(first + i, first + span, tp)
        for first in range(0, world.world_size, span)
        for i in range(tp)
    ]
    _groups.pp = _own_group(columns)
    # What goes back must not queue behind what goes forward: each has channels of its own.
    _groups.pp_back = _own_group(columns, own_channels=True)
    peers = [range(place, world.world_size, span) for place in range(span)]
    _groups.dp = _own_group(peers, has_collectives=True)
    _groups.sizes = sizes


def share_memory(timeout_s: int | None = None) -> None:
    """Let small sums of the tensor-parallel group travel through memory that its GPUs share, if
    they can. `timeout_s`: longest wait of such a sum, NCCL's own for None. All ranks of the group
    call this, before any graph is captured."""
    group = _groups.tp
    if _groups.device.type != "cuda" or group.device_group is None or group.peer_sums is not None:
        return
    peers = connect_peers(
        group.rank_in_group, group.world_size, group.device_group, _groups.device, timeout_s
    )
    _groups.tp = replace(group, peer_sums=peers)


def _bound_device() -> torch.device | None:
    """What groups with collectives are bound to: this process's GPU, if that is where they run."""
    return _groups.device if _groups.device.type == "cuda" else None


def _own_group(
    partition: list[range], own_channels: bool = False, has_collectives: bool = False
) -> GroupCoordinator:
    """Make every group of `partition` (a collective call) and return this process's."""
    rank = _groups.world.rank
    own: GroupCoordinator | None = None
    for ranks in partition:
        several = len(ranks) > 1
        handle = _process_group(ranks, own_channels, has_collectives) if several else None
        if rank in ranks:
            own = GroupCoordinator(tuple(ranks), ranks.index(rank), handle)
    assert own is not None, f"rank {rank} is in none of {partition}"
    return own


def _process_group(
    ranks: range, own_channels: bool, has_collectives: bool
) -> dist.ProcessGroup | None:
    """Torch's handle; that of the world, which exists already, where it is the same and need not
    have channels of its own."""
    if len(ranks) == _groups.world.world_size and not own_channels:
        return _groups.world.device_group
    return dist.new_group(list(ranks), device_id=_bound_device() if has_collectives else None)


@contextmanager
def without_communication() -> Iterator[None]:
    """Inside the block collectives give tensors of the right shapes without communicating, for runs
    that not every rank makes and whose results are dropped."""
    _groups.communicates_not = True
    try:
        yield
    finally:
        _groups.communicates_not = False


@contextmanager
def as_first_rank_of(
    tp_size: int, stage: int = 0, num_stages: int = 1, replicas: int = 1
) -> Iterator[None]:
    """Inside the block layers are built as rank 0 of `tp_size` of a pipeline stage builds them;
    `replicas`: how many share experts.

    For shapes only: there are no other ranks to communicate with.
    """
    own = _groups.tp, _groups.pp, _groups.dp
    _groups.tp = GroupCoordinator(ranks=tuple(range(tp_size)), rank_in_group=0)
    columns = tuple(range(0, num_stages * tp_size, tp_size))
    _groups.pp = GroupCoordinator(ranks=columns, rank_in_group=stage)
    peers = tuple(range(0, replicas * num_stages * tp_size, num_stages * tp_size))
    _groups.dp = GroupCoordinator(ranks=peers, rank_in_group=0)
    try:
        yield
    finally:
        _groups.tp, _groups.pp, _groups.dp = own


@contextmanager
def as_rank(rank: int, tp_size: int) -> Iterator[None]:
    """Inside the block this process is `rank` of `tp_size` for whoever asks, and cannot communicate
    with the others: for workers side by side in one process."""
    own = _groups.tp
    _groups.tp = GroupCoordinator(ranks=tuple(range(tp_size)), rank_in_group=rank)
    try:
        yield
    finally:
        _groups.tp = own


def model_parallel_is_initialized() -> bool:
    return _groups.sizes is not None


def destroy_model_parallel() -> None:
    """Forget the groups inside the world. No graph that uses them may run again."""
    if _groups.tp.peer_sums is not None:
        _groups.tp.peer_sums.close()
    _groups.tp = _groups.pp = _groups.pp_back = _groups.dp = _SOLO
    _groups.sizes = None


def destroy_distributed_environment() -> None:
    """Leave the world."""
    inner = (_groups.tp, _groups.pp, _groups.pp_back, _groups.dp)
    handles = {group.device_group for group in (_groups.world, *inner)}
    destroy_model_parallel()
    _groups.world = _SOLO
    _groups.device = torch.device("cpu")
    if dist.is_available() and dist.is_initialized():
        # NCCL's groups, shut down, must not be deleted: their destructor holds Python's lock and
        # waits for threads that want it (torch 2.11).
        for handle in handles - {None}:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
        dist.destroy_process_group()


def get_world_group() -> GroupCoordinator:
    return _groups.world


def get_tp_group() -> GroupCoordinator:
    return _groups.tp


def get_pp_group() -> GroupCoordinator:
    return _groups.pp


def get_dp_group() -> GroupCoordinator:
    """The ranks of the same place in replicas that share experts; this process alone where
    replicas are independent."""
    return _groups.dp


def get_ep_group() -> GroupCoordinator:
    """The ranks that whole experts are spread over, replica after replica: those that share layers,
    of all replicas that share experts."""
    return _groups.tp if _groups.dp.world_size == 1 else _groups.world


def get_pp_back_group() -> GroupCoordinator:
    """The same processes as `get_pp_group`'s, for what the last stage sends to earlier ones."""
    return _groups.pp_back


def stores_hidden_states() -> bool:
    """Whether this process hands captured hidden states on: they are whole on each
    tensor-parallel rank of the last pipeline stage, and the first one does it."""
    return _groups.tp.is_first_rank and _groups.pp.is_last_rank


def get_tensor_model_parallel_rank() -> int:
    return _groups.tp.rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    return _groups.tp.world_size
