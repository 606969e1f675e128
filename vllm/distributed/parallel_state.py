# SPDX-License-Identifier: Apache-2.0
"""The process groups of one engine and this process's place in them.

Until `initialize_model_parallel` runs, every group holds this process alone, so a layer built
outside an engine is an unsharded layer.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from vllm.distributed.device_communicators.peer_sums import connect_peers
from vllm.distributed.device_communicators.pushed_sums import LargestSum
from vllm.distributed.group_coordinator import PROCESS, GroupCoordinator
from vllm.distributed.rendezvous import store_of
from vllm.distributed.utils import ensure_divisibility

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
        PROCESS.device = torch.device("cuda", rank if local_rank < 0 else local_rank)
        torch.cuda.set_device(PROCESS.device)
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


def share_memory(timeout_s: int | None = None, largest: LargestSum | None = None) -> None:
    """Let small sums of the tensor-parallel group, and those of products up to `largest`, travel
    through memory that its GPUs share, if they can. `timeout_s`: longest wait of such a sum, NCCL's
    own for None. All ranks of the group call this, before any graph is captured."""
    group = _groups.tp
    if PROCESS.device.type != "cuda" or group.device_group is None or group.peer_sums is not None:
        return
    rank, ranks, handle = group.rank_in_group, group.world_size, group.device_group
    peers = connect_peers(rank, ranks, handle, PROCESS.device, timeout_s, largest)
    _groups.tp = replace(group, peer_sums=peers)


def _bound_device() -> torch.device | None:
    """What groups with collectives are bound to: this process's GPU, if that is where they run."""
    return PROCESS.device if PROCESS.device.type == "cuda" else None


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
    PROCESS.communicates_not = True
    try:
        yield
    finally:
        PROCESS.communicates_not = False


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
    PROCESS.device = torch.device("cpu")
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
