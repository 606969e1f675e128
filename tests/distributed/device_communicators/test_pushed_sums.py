# SPDX-License-Identifier: Apache-2.0
"""Large sums of two ranks that are threads, whose memory is the host's. On GPUs:
tests/gpu/test_pushed_sums_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm.compilation.monitor import capturing
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import pushed_sums
from vllm.distributed.device_communicators.peer_sums import PeerSums
from vllm.distributed.device_communicators.pushed_sums import (
    SMALLEST,
    LargestSum,
    PushedPair,
    PushedSums,
    runs,
)
from vllm.kernels.all_reduce.naive import sum_ranks
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.residual_stream import Norm
from vllm.model_executor.layers.linear import RowParallelLinear

COLUMNS = 16


@dataclass
class Rank:
    """One rank's memory; `all_ranks` are the same list everywhere."""

    rank: int
    all_ranks: list[Rank]
    memory: Tensor
    changed: Condition
    flags: dict[tuple[int, int], int] = field(default_factory=dict)

    def pushed(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        end = offset + rows * columns * dtype.itemsize
        assert end <= len(self.memory)
        return self.memory[offset:end].view(dtype).view(rows, columns)

    def push(self, rows: Tensor, receiver: int, offset: int) -> None:
        assert receiver != self.rank
        with self.changed:
            self.all_ranks[receiver].pushed(offset, *rows.shape, rows.dtype).copy_(rows)

    def signal(self, flag: int, value: int) -> None:
        with self.changed:
            for one in self.all_ranks:
                assert one.flags.get((flag, self.rank), 0) < value
                one.flags[flag, self.rank] = value
            self.changed.notify_all()

    def wait_for(self, flag: int, value: int) -> None:
        def told() -> bool:
            return all(self.flags.get((flag, rank), 0) >= value for rank in (0, 1))

        with self.changed:
            assert self.changed.wait_for(told, timeout=20), "a rank waits alone"


class Inline:
    """One lane: what is launched has run."""

    def sending(self) -> AbstractContextManager[None]:
        return nullcontext()

    def await_sent(self) -> None: ...


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushed_sums, "SMALLEST", 4 * COLUMNS * 4)


def sums_of(largest: LargestSum) -> list[PushedSums]:
    everyone: list[Rank] = []
    changed = Condition()
    for rank in range(2):
        memory = torch.full((largest.push_bytes,), 255, dtype=torch.uint8)
        everyone.append(Rank(rank, everyone, memory, changed))
    return [PushedSums(one, Inline(), largest) for one in everyone]


def on_each(sums: list[PushedSums], call: Callable[[int, PushedSums], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(sums)) as threads:
        return list(threads.map(call, range(len(sums)), sums))


def test_both_ranks_have_the_sum() -> None:
    torch.manual_seed(0)
    sums = sums_of(LargestSum(61, COLUMNS, 2))
    for rows in (61, 4, 17, 60, 1, 61):
        parts = [torch.randn(rows, COLUMNS).bfloat16() for _ in sums]

        def on_rank(rank: int, own: PushedSums, parts: list[Tensor] = parts) -> Tensor:
            return own.begin(len(parts[rank]), torch.bfloat16, lambda run: parts[rank][run]).sum()

        for found in on_each(sums, on_rank):
            assert torch.equal(found, sum_ranks(parts))


def test_with_the_norm_it_has_the_bits_of_separate_ops() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(40, COLUMNS) for _ in range(2)]
    residual, norm = torch.randn(40, COLUMNS), Norm(torch.randn(COLUMNS), 1e-6, True)

    def on_rank(rank: int, own: PushedSums) -> tuple[Tensor, Tensor]:
        begun = own.begin(40, torch.float32, lambda run: parts[rank][run])
        return begun.sum_add_norm(residual, norm)

    total = sum_ranks(parts) + residual
    expected = NaiveKernels().rms_norm(total, norm.weight, norm.eps, one_plus=True)
    for normed, stream in on_each(sums_of(LargestSum(40, COLUMNS, 4)), on_rank):
        assert torch.equal(stream, total)
        torch.testing.assert_close(normed, expected)


def test_a_sum_that_nobody_has_read_survives_the_next() -> None:
    parts = [
        [torch.full((8, COLUMNS), float(10 * n + rank)) for rank in range(2)] for n in range(4)
    ]

    def on_rank(rank: int, own: PushedSums) -> list[Tensor]:
        begun = [own.begin(8, torch.float32, lambda run, one=one: one[rank][run]) for one in parts]
        return [one.sum() for one in begun]

    for found in on_each(sums_of(LargestSum(8, COLUMNS, 4)), on_rank):
        for total, of_ranks in zip(found, parts, strict=True):
            assert torch.equal(total, sum_ranks(of_ranks))


def test_a_slow_rank_reads_its_own_sum_and_not_the_next() -> None:
    """The other one has pushed its part of the next sum before this one reads."""
    parts = [torch.full((8, COLUMNS), float(n)) for n in range(3)]
    slow, quick = sums_of(LargestSum(8, COLUMNS, 4))
    mine = slow.begin(8, torch.float32, lambda run: parts[0][run])
    assert torch.equal(quick.begin(8, torch.float32, lambda run: parts[1][run]).sum(), parts[1])
    quick.begin(8, torch.float32, lambda run: parts[2][run])
    assert torch.equal(mine.sum(), parts[1])
    last = slow.begin(8, torch.float32, lambda run: parts[1][run])
    assert torch.equal(last.sum(), parts[1] + parts[2])


def test_a_sum_that_was_read_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    part, norm = torch.ones(8, COLUMNS), Norm(torch.ones(COLUMNS), 1e-6, False)

    def on_rank(rank: int, own: PushedSums) -> PushedPair:
        first = own.begin(8, torch.float32, lambda run: part[run])
        first.sum_add_norm(part, norm)
        own.begin(8, torch.float32, lambda run: part[run])
        return first

    monkeypatch.setattr(pushed_sums, "takes_pair", lambda residual: True)
    monkeypatch.setattr(pushed_sums, "add_pair_norm", lambda *args: None)
    for first in on_each(sums_of(LargestSum(8, COLUMNS, 4)), on_rank):
        with pytest.raises(RuntimeError, match="for a second time"):
            first.sum()


def test_what_is_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushed_sums, "SMALLEST", SMALLEST)
    (own, _) = sums_of(LargestSum(8192, 1024, 2))
    assert own.takes(8192, 1024, torch.bfloat16) and own.takes(4096, 1024, torch.float16)
    assert not own.takes(4095, 1024, torch.bfloat16), "small"
    assert not own.takes(8193, 1024, torch.bfloat16), "larger than there is room"
    assert not own.takes(8192, 2048, torch.bfloat16), "other columns"
    assert not own.takes(8192, 1024, torch.float32), "another dtype"
    with capturing():
        assert not own.takes(8192, 1024, torch.bfloat16), "in a graph"
    assert LargestSum(4096, 1024, 2).is_worth_pushing
    assert not LargestSum(4096, 1028, 2).is_worth_pushing, "rows are not whole words"
    assert not LargestSum(2048, 1024, 2).is_worth_pushing


def test_runs_cover_all_rows() -> None:
    for rows in range(20):
        for count in (1, 2, 5):
            found = runs(rows, count)
            covered = [row for run in found for row in range(run.start, run.stop)]
            assert covered == list(range(rows)) and len(found) == count
            sizes = [run.stop - run.start for run in found]
            assert max(sizes) - min(sizes) <= 1


class Small:
    """A group's memory for small messages, which takes none."""

    def close(self) -> None: ...


@pytest.fixture
def ranks_of_a_layer() -> Iterator[list[PushedSums]]:
    """Rank 0 of two: what its group adds up with."""
    sums = sums_of(LargestSum(32, COLUMNS, 4))
    with parallel_state.as_first_rank_of(2):
        groups: Any = parallel_state._groups
        memory: Any = Small()
        groups.tp = replace(groups.tp, peer_sums=PeerSums(memory, sums[0]))
        yield sums


def test_a_layer_s_product_is_pushed_piece_by_piece(ranks_of_a_layer: list[PushedSums]) -> None:
    torch.manual_seed(0)
    layer = RowParallelLinear(32, COLUMNS, bias=True, params_dtype=torch.float32)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    residual, x, other = torch.randn(32, COLUMNS), torch.randn(32, COLUMNS), torch.randn(32, 16)
    with ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(
            lambda: ranks_of_a_layer[1].begin(32, torch.float32, lambda run: other[run]).sum()
        )
        stream = layer.add_to(residual, x)
        assert isinstance(stream.branch, PushedPair)
        total = stream.total
        theirs.result()
    assert layer.bias is not None
    torch.testing.assert_close(total, residual + x @ layer.weight.T + layer.bias + other)
