# SPDX-License-Identifier: Apache-2.0
"""Sharding arithmetic, and the groups of one process."""

import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm import distributed
from vllm.distributed import parallel_state
from vllm.distributed.utils import divide, per_rank


def test_divide_is_exact() -> None:
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match="13 is not divisible by 4"):
        divide(13, 4)


def test_what_cannot_be_shared_is_named() -> None:
    assert per_rank("heads", 12, 4) == 3
    with pytest.raises(ValueError, match="13 heads cannot be divided among 4 tensor-parallel"):
        per_rank("heads", 13, 4)


def test_a_process_alone_is_its_own_group() -> None:
    group = parallel_state.get_tp_group()
    x = torch.ones(3)
    assert (group.world_size, group.rank_in_group, group.rank) == (1, 0, 0)
    assert group.is_first_rank and group.is_last_rank
    assert group.all_reduce(x) is x and group.all_gather(x) is x
    assert distributed.tensor_model_parallel_all_reduce(x) is x
    assert distributed.get_tensor_model_parallel_world_size() == 1


def test_initialising_a_world_of_one() -> None:
    parallel_state.init_distributed_environment(world_size=1, rank=0)
    try:
        parallel_state.initialize_model_parallel(1, 1)
        assert parallel_state.model_parallel_is_initialized()
        assert not torch.distributed.is_initialized()
        with pytest.raises(ValueError, match="1 is not divisible by 2"):
            parallel_state.initialize_model_parallel(2, 1)
    finally:
        parallel_state.destroy_distributed_environment()
    assert not parallel_state.model_parallel_is_initialized()


def test_replicas_of_ranks_that_share_experts(asked: "_Torch") -> None:
    """Rank 3 of two replicas of two: the second rank of the second."""
    parallel_state.init_distributed_environment(4, 3, "file:///nowhere", 1, "nccl")
    parallel_state.initialize_model_parallel(2)
    own = torch.device("cuda", 1)
    assert asked.bound == dict.fromkeys([(), (0, 1), (2, 3), (0, 2), (1, 3)], own)
    tp, dp = parallel_state.get_tp_group(), parallel_state.get_dp_group()
    assert (tp.ranks, tp.rank_in_group) == ((2, 3), 1)
    assert (dp.ranks, dp.rank_in_group) == ((1, 3), 1)
    experts = parallel_state.get_ep_group()
    assert (experts.ranks, experts.rank_in_group) == ((0, 1, 2, 3), 3)


def test_a_run_without_communication_has_the_right_shapes() -> None:
    """There is nobody to answer: a collective would fail."""
    x = torch.ones(3, 2)
    with parallel_state.as_first_rank_of(4), parallel_state.without_communication():
        group = parallel_state.get_tp_group()
        assert group.all_reduce(x).shape == (3, 2)
        assert group.all_gather(x).shape == (3, 8) and group.all_gather(x, 0).shape == (12, 2)
        assert group.reduce_scatter(torch.ones(12, 2)).shape == (3, 2)
    with parallel_state.as_first_rank_of(4), pytest.raises(ValueError):
        parallel_state.get_tp_group().all_reduce(x)


class _Torch:
    """What torch.distributed was asked for."""

    def __init__(self) -> None:
        self.bound: dict[tuple[int, ...], torch.device | None] = {}
        self.current: Any = None

    def init_process_group(self, backend: str, device_id: torch.device | None, **_: Any) -> None:
        self.bound[()] = device_id

    def new_group(self, ranks: list[int], device_id: torch.device | None) -> object:
        self.bound[tuple(ranks)] = device_id
        return object()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Torch]:
    asked = _Torch()
    monkeypatch.setattr(dist, "init_process_group", asked.init_process_group)
    monkeypatch.setattr(dist, "new_group", asked.new_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda one: setattr(asked, "current", one))
    yield asked
    parallel_state.destroy_distributed_environment()


def _join(tp: int, pp: int, rank: int, backend: str = "nccl") -> None:
    parallel_state.init_distributed_environment(
        tp * pp, rank, "file:///nowhere", rank, backend, has_collectives=pp == 1
    )
    parallel_state.initialize_model_parallel(tp, pp)


def test_ranks_of_a_layer_are_bound_to_their_gpus(asked: _Torch) -> None:
    _join(tp=2, pp=1, rank=1)
    assert asked.bound == {(): torch.device("cuda", 1)}
    assert asked.current == torch.device("cuda", 1)
    assert parallel_state.get_tp_group().device_group is dist.group.WORLD


def test_channels_of_stages_are_not_bound(asked: _Torch) -> None:
    """Messages of bound groups would wait for each other."""
    _join(tp=2, pp=2, rank=3)
    own = torch.device("cuda", 3)
    assert asked.bound == {(): None, (0, 1): own, (2, 3): own, (0, 2): None, (1, 3): None}


def test_nothing_is_bound_on_a_cpu(asked: _Torch) -> None:
    _join(tp=2, pp=2, rank=3, backend="gloo")
    assert set(asked.bound.values()) == {None} and asked.current is None


def test_a_world_is_split_once(asked: _Torch) -> None:
    """The file through which processes met is gone by then."""
    _join(tp=2, pp=2, rank=3)
    groups = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    back = parallel_state.get_pp_back_group()
    asked.bound.clear()
    parallel_state.initialize_model_parallel(2, 2)
    assert not asked.bound
    assert (parallel_state.get_tp_group(), parallel_state.get_pp_group()) == groups
    assert parallel_state.get_pp_back_group() is back
    parallel_state.initialize_model_parallel(1, 4)
    assert set(asked.bound) == {(0, 1, 2, 3)}, "another split has groups of its own"
    assert parallel_state.get_pp_group().ranks == (0, 1, 2, 3)


def _scatter(rank: int, folder: Path) -> None:
    parallel_state.init_distributed_environment(3, rank, f"file://{folder}/store", backend="gloo")
    parallel_state.initialize_model_parallel(3)
    group, large = parallel_state.get_tp_group(), 2.0**24
    x = torch.arange(6.0).reshape(6, 1) + 10 * rank
    # In fp32 this sum is 1 in the ranks' order, and 0 or 2 in others.
    order = torch.full((3, 1), (large, -large, 1.0)[rank])
    # One and two halves of a unit in its last place, each of which alone would be rounded away.
    halves = torch.full((3, 1), (1.0, 2.0**-8, 2.0**-8)[rank], dtype=torch.bfloat16)
    torch.save(
        [group.reduce_scatter(one) for one in (x, x.expand(6, 2).t().t(), order, halves)],
        folder / f"{rank}.pt",
    )
    parallel_state.destroy_distributed_environment()


def test_sums_are_scattered(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_scatter, args=(rank, tmp_path)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    for rank in range(3):
        plain, wide, order, halves = torch.load(tmp_path / f"{rank}.pt")
        assert plain[:, 0].tolist() == [30 + 3 * row for row in (2 * rank, 2 * rank + 1)]
        assert torch.equal(wide, plain.expand(2, 2))
        assert order.tolist() == [[1.0]] and halves.dtype is torch.bfloat16
        assert halves.tolist() == [[1.0 + 2.0**-7]]


def _exchange(rank: int, folder: Path) -> None:
    parallel_state.init_distributed_environment(3, rank, f"file://{folder}/store", backend="gloo")
    parallel_state.initialize_model_parallel(3)
    assert parallel_state.get_ep_group() is parallel_state.get_tp_group()
    sent = torch.arange(4, dtype=torch.uint8).expand(2, 4) + torch.tensor([[10], [20]]) * rank
    got = torch.zeros(2, 4, dtype=torch.uint8)
    # The first gives both rows to the last, which gives one to the second.
    sends = {0: [(sent.byte()[0], 2), (sent.byte()[1], 2)], 2: [(sent.byte()[1], 1)]}
    receives = {1: [(got[0], 2)], 2: [(got[1], 0), (got[0], 0)]}
    parallel_state.get_ep_group().exchange(sends.get(rank, []), receives.get(rank, []))
    torch.save((sent, got), folder / f"{rank}.pt")
    parallel_state.destroy_distributed_environment()


def test_tensors_are_exchanged(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_exchange, args=(rank, tmp_path)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    (first, none), (_, second), (last, both) = (torch.load(tmp_path / f"{r}.pt") for r in range(3))
    assert not none.any() and not second[1].any()
    assert torch.equal(second[0], last[1].byte())
    assert torch.equal(both.flip(0), first.byte())


def _vote(rank: int, folder: Path) -> None:
    warnings.simplefilter("error", FutureWarning)  # each worker of a server would print it
    parallel_state.init_distributed_environment(2, rank, f"file://{folder}/store", backend="gloo")
    parallel_state.initialize_model_parallel(2)
    group = parallel_state.get_tp_group()
    votes = [group.all_agree(mine) for mine in (True, rank == 0, False)]
    x = torch.full((2, 3), float(rank + 1))
    kept = group.all_reduce(x)
    gathered = [group.all_gather(x, dim) for dim in (0, 1)]
    transposed = group.all_gather(torch.arange(6.0).reshape(2, 3).t() + rank)
    summed = group.all_reduce(x.clone().t(), in_place=True)
    torch.save((votes, x, kept, gathered, transposed, summed), folder / f"{rank}.pt")
    parallel_state.destroy_distributed_environment()


def test_collectives_of_two_processes(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_vote, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    for rank in range(2):
        votes, x, kept, gathered, transposed, summed = torch.load(tmp_path / f"{rank}.pt")
        assert votes == [True, False, False]
        assert x.unique().tolist() == [rank + 1] and kept.unique().tolist() == [3]
        assert torch.equal(gathered[0], torch.tensor([[1.0] * 3] * 2 + [[2.0] * 3] * 2))
        assert torch.equal(gathered[1], torch.tensor([[1.0] * 3 + [2.0] * 3] * 2))
        columns = torch.arange(6.0).reshape(2, 3).t()
        assert torch.equal(transposed, torch.cat([columns, columns + 1], dim=-1))
        assert torch.equal(summed, torch.full((3, 2), 3.0))
