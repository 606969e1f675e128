# SPDX-License-Identifier: Apache-2.0
"""Ranks that can share memory, and layers whose sums wait for the norm that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from vllm import decisions
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import peer_sums
from vllm.distributed.device_communicators.peer_sums import PeerPart, PeerSums, connect_peers
from vllm.distributed.device_communicators.pushed_sums import LargestSum
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.model_executor.layers.linear import RowParallelLinear

DEVICE = torch.device("cuda", 0)


@dataclass
class Memory:
    """A rank's inbox, without a GPU."""

    device: torch.device
    rank: int
    ranks: int
    capacity: int
    timeout_s: float
    push_bytes: int
    opened: dict[int, bytes] = field(default_factory=dict)
    is_closed: bool = False

    def export(self) -> bytes:
        return b"own"

    def open(self, rank: int, handle: bytes) -> None:
        if handle == b"elsewhere":
            raise RuntimeError("invalid device context")
        self.opened[rank] = handle

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Host:
    """What ranks tell each other: `others` change what rank 0 says of itself."""

    others: list[dict[str, Any]]
    late: str = ""
    reaches: bool = True
    memories: list[Memory] = field(default_factory=list)

    def gather(self, found: list[Any], own: Any, group: object) -> None:
        if isinstance(own, str):
            found[:] = [own] + [self.late] * len(self.others)
        else:
            found[:] = [own] + [replace(own, **{"gpu": "b"} | one) for one in self.others]


class Built:
    """The compiled ops, which run anywhere."""

    def choose(self, capability: tuple[int, int]) -> bool:
        return True


@dataclass
class Properties:
    uuid: str


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[PeerSums | None, Host]]:
    """Rank 0 meets others of a host that has two GPUs, `a` and `b`."""

    def run(
        *others: dict[str, Any], largest: LargestSum | None = None, **settings: Any
    ) -> tuple[PeerSums | None, Host]:
        host = Host(list(others) or [{}], **settings)

        def memory(*args: Any, **kwargs: Any) -> Memory:
            host.memories.append(Memory(*args, **kwargs))
            return host.memories[-1]

        monkeypatch.setattr(peer_sums, "PeerMemory", memory)
        monkeypatch.setattr(peer_sums, "OPS", Built())
        monkeypatch.setattr(peer_sums, "DeviceLane", lambda device: None)
        monkeypatch.setattr(dist, "all_gather_object", host.gather)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: Properties("a" if device in (DEVICE, 0) else "b"),
        )
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: host.reaches)
        group: Any = object()
        return connect_peers(0, 1 + len(host.others), group, DEVICE, 20, largest), host

    return run


def chosen(messages: str = "small messages") -> tuple[str, str]:
    found = {one.what: one for one in decisions.decisions()}[f"all-reduce of {messages}"]
    return found.chosen, found.why


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    with decisions.DecisionLog(is_logged=False).current():
        yield


def test_ranks_of_one_host_open_each_other_s_memory(meet: Any) -> None:
    found, host = meet({"handle": b"one"}, {"handle": b"two", "gpu": "not visible here"})
    assert found is not None and chosen()[0] == "peer memory, up to 512 kB"
    (memory,) = host.memories
    assert memory.opened == {1: b"one", 2: b"two"} and not memory.is_closed
    assert (memory.rank, memory.ranks, memory.timeout_s) == (0, 3, 20)
    assert found.pushed is None and memory.push_bytes == 0


def test_large_products_are_pushed_where_there_are_any(meet: Any) -> None:
    found, host = meet({}, largest=LargestSum(8192, 5120, 2))
    assert found is not None and found.pushed is not None
    (memory,) = host.memories
    assert memory.push_bytes == 2 * 8192 * 5120 * 2
    assert chosen("large products")[0] == "copy engines, from 8 MiB"
    assert "168 MB on each GPU" in chosen("large products")[1]
    found, host = meet({}, largest=LargestSum(512, 5120, 2))
    assert found is not None and found.pushed is None and host.memories[0].push_bytes == 0
    assert chosen("large products")[0] == "NCCL"
    assert "steps of 512 tokens they have 5.0 MiB" in chosen("large products")[1]


def test_only_two_ranks_push(meet: Any) -> None:
    found, host = meet({}, {}, largest=LargestSum(8192, 5120, 2))
    assert found is not None and found.pushed is None and host.memories[0].push_bytes == 0
    assert chosen("large products")[0] == "NCCL" and "3 ranks" in chosen("large products")[1]


@pytest.mark.parametrize(
    ("others", "settings", "why"),
    [
        ([{"host": "another"}], {}, "several hosts"),
        ([{"obstacle": "no compiled ops"}], {}, "no compiled ops"),
        ([{}], {"reaches": False}, "no peer access to the GPU of another rank, cuda:1"),
        ([{"handle": b"elsewhere"}], {}, "rank 1 cannot be mapped: invalid device context"),
        ([{}], {"late": "it failed there"}, "it failed there"),
        ([{}] * 8, {}, "9 ranks share sums"),
    ],
)
def test_else_all_ranks_use_nccl(
    meet: Any, others: list[dict[str, Any]], settings: dict[str, Any], why: str
) -> None:
    found, host = meet(*others, largest=LargestSum(8192, 5120, 2), **settings)
    assert found is None
    assert chosen()[0] == "NCCL" and why in chosen()[1]
    assert chosen("large products")[0] == "NCCL"
    assert len(others) > 1 or why in chosen("large products")[1]
    assert all(memory.is_closed for memory in host.memories)


def test_no_memory_is_shared_on_a_cpu() -> None:
    parallel_state.share_memory()
    assert parallel_state.get_tp_group().peer_sums is None


class TwoRanks:
    """Sums with another rank that has the same part."""

    pushed = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def takes(self, x: Tensor) -> bool:
        return True

    def takes_norm(self, x: Tensor, residual: Tensor) -> bool:
        return x.shape[0] <= 4

    def sum(self, x: Tensor) -> Tensor:
        self.calls.append("sum")
        return x + x

    def sum_add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        self.calls.append("with norm")
        total = x + x + residual
        return NaiveKernels().rms_norm(total, norm.weight, norm.eps, one_plus=norm.one_plus), total

    def close(self) -> None:
        self.calls.append("closed")


@pytest.fixture
def two() -> Iterator[TwoRanks]:
    ranks = TwoRanks()
    with parallel_state.as_first_rank_of(2):
        groups: Any = parallel_state._groups
        groups.tp = replace(groups.tp, peer_sums=ranks)
        yield ranks


def layer_of(two: TwoRanks, **settings: Any) -> RowParallelLinear:
    torch.manual_seed(0)
    layer = RowParallelLinear(32, 16, bias=False, params_dtype=torch.float32, **settings)
    torch.nn.init.normal_(layer.weight)
    return layer


@pytest.mark.parametrize(("tokens", "calls"), [(3, ["with norm"]), (5, ["sum"])])
def test_a_branch_is_added_up_with_the_norm_or_before_it(
    two: TwoRanks, tokens: int, calls: list[str]
) -> None:
    layer, kernels = layer_of(two), NaiveKernels()
    residual, x = torch.randn(tokens, 16), torch.randn(tokens, 16)
    norm = Norm(torch.randn(16), 1e-6, False)
    part = x @ layer.weight.T
    normed, total = kernels.enter(layer.add_to(residual, x), norm)
    assert two.calls == calls
    torch.testing.assert_close(total, residual + 2 * part)
    torch.testing.assert_close(normed, kernels.rms_norm(total, norm.weight, norm.eps))


def test_whoever_reads_the_stream_gets_the_sum(two: TwoRanks) -> None:
    residual, x = torch.randn(2, 16), torch.randn(2, 16)
    layer = layer_of(two)
    stream = layer.add_to(residual, x)
    part = x @ layer.weight.T
    torch.testing.assert_close(stream.total, residual + 2 * part)
    assert isinstance(stream.branch, PeerPart) and stream.added_branch is not None
    torch.testing.assert_close(stream.added_branch, 2 * part)
    alone = ResidualStream(residual)
    assert alone.added_branch is None and alone.total is residual


def test_a_part_that_nobody_adds_up_stays_one(two: TwoRanks) -> None:
    layer = layer_of(two, reduce_results=False)
    residual, x = torch.randn(2, 16), torch.randn(2, 16)
    torch.testing.assert_close(layer.add_to(residual, x).total, residual + x @ layer.weight.T)
    assert not two.calls


def test_a_run_without_communication_sums_nothing(two: TwoRanks) -> None:
    x = torch.randn(2, 16)
    with parallel_state.without_communication():
        assert parallel_state.get_tp_group().all_reduce(x) is x
        assert isinstance(layer_of(two).add_to(x, x).branch, Tensor)
    assert not two.calls


def test_the_memory_is_given_back_with_the_groups(two: TwoRanks) -> None:
    assert torch.equal(
        parallel_state.get_tp_group().all_reduce(torch.ones(2)), torch.full((2,), 2.0)
    )
    parallel_state.destroy_model_parallel()
    assert two.calls == ["sum", "closed"]
