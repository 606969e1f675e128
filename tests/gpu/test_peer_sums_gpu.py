# SPDX-License-Identifier: Apache-2.0
"""Sums through peer memory: several ranks as streams of one GPU, and two ranks on two GPUs."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vllm.compilation.piecewise import DeviceGraph
from vllm.distributed import parallel_state
from vllm.kernels.all_reduce.cuda import OPS, PeerMemory
from vllm.kernels.all_reduce.naive import sum_ranks
from vllm.kernels.residual_stream import Norm
from vllm.platforms import current_platform

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

BF16 = torch.bfloat16
CAPACITY = 512 * 1024
WAIT_S = 10.0
#: of the numbers of sums, the last before they begin again and before slots are cleaned
LAST, CLEANED = 2**32 - 1, 2**20


@pytest.fixture(scope="module", autouse=True)
def _ops() -> None:
    if not OPS.choose(torch.cuda.get_device_capability()):
        pytest.skip("the kernels need compute capability 9.0 and a build of the CUDA ops")


class Ranks:
    """Ranks that are streams of one GPU."""

    def __init__(self, count: int, first: int = 2) -> None:
        self.device = torch.device("cuda", 0)
        self.streams = [torch.cuda.Stream(self.device) for _ in range(count)]
        self.memories = [
            PeerMemory(self.device, r, count, CAPACITY, WAIT_S, first) for r in range(count)
        ]
        for memory in self.memories:
            for rank, other in enumerate(self.memories):
                memory.join(rank, other)
        for stream in self.streams:  # while a rank waits, nothing may ask the device for memory
            with torch.cuda.stream(stream):
                _ = [torch.empty(size, device=self.device) for size in (2**10, 2**22)]

    def each(self, call: Callable[[int, PeerMemory], None]) -> None:
        """`call(rank, memory)` on the stream of each rank, and wait for all."""
        torch.cuda.synchronize()
        for rank, (stream, memory) in enumerate(zip(self.streams, self.memories, strict=True)):
            with torch.cuda.stream(stream):
                call(rank, memory)
        torch.cuda.synchronize()

    def sums(self, parts: list[Tensor], two_shots: bool) -> list[Tensor]:
        found: list[Tensor] = []
        self.each(lambda rank, memory: found.append(memory.sum(parts[rank], two_shots)))
        return found

    def sums_with_norm(
        self, parts: list[Tensor], residual: Tensor, norm: Norm, two_shots: bool
    ) -> list[tuple[Tensor, Tensor]]:
        found: list[tuple[Tensor, Tensor]] = []
        self.each(
            lambda rank, memory: found.append(
                memory.sum_add_norm(parts[rank], residual, norm, two_shots)
            )
        )
        return found


@contextmanager
def ranks_of(count: int, first: int = 2) -> Iterator[Ranks]:
    torch.manual_seed(0)
    ranks = Ranks(count, first)
    yield ranks
    for memory in ranks.memories:
        memory.close()


def parts_of(ranks: int, *shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.randn(*shape, device="cuda").to(dtype) for _ in range(ranks)]


def assert_all_equal(found: list[Tensor], expected: Tensor) -> None:
    for one in found:
        assert one.shape == expected.shape and torch.equal(one, expected)


@pytest.mark.parametrize("two_shots", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_rank_has_the_sum_in_rank_order(count: int, two_shots: bool) -> None:
    """Large after small and small after large: what a slot held before is never taken. All ranks'
    blocks have to fit the one GPU together."""
    large = CAPACITY // (4 if count < 4 else 16)
    with ranks_of(count) as ranks:
        for dtype in (BF16, torch.float16, torch.float32):
            for size in (8, 4096, 40, large, 51208, 8, large, 2560):
                parts = parts_of(count, size, dtype=dtype)
                assert_all_equal(ranks.sums(parts, two_shots), sum_ranks(parts))


def test_a_sum_is_rounded_once_and_in_the_order_of_ranks() -> None:
    """256 + 1 is 256 in bfloat16, 256 + 1 + 1 is 258; and 2e38 twice is infinite on the way."""
    with ranks_of(4) as ranks:
        values = ((256, 1, 1, 0), (1, 1, 256, 0), (2e38, 2e38, -2e38, -2e38), (0, -0.0, 0, 0))
        for ordered in values:
            parts = [torch.full((8,), one, dtype=BF16, device="cuda") for one in ordered]
            for two_shots in (False, True):
                assert_all_equal(ranks.sums(parts, two_shots), sum_ranks(parts))


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("columns", [520, 1024, 1536, 2560, 4096, 5120, 8192])
@pytest.mark.parametrize("count", [2, 3])
def test_with_the_norm_it_has_the_bits_of_separate_kernels(
    count: int, columns: int, one_plus: bool
) -> None:
    kernels = current_platform.kernels
    with ranks_of(count) as ranks:
        for tokens in (1, 3, 16, 31):
            for dtype in (BF16, torch.float16):
                parts = parts_of(count, tokens, columns, dtype=dtype)
                (residual,) = parts_of(1, tokens, columns, dtype=dtype)
                norm = Norm(torch.randn(columns, device="cuda").to(dtype), 1e-6, one_plus)
                expected = kernels.fused_add_rms_norm(
                    sum_ranks(parts), residual, norm.weight, norm.eps, one_plus=one_plus
                )
                for two_shots in (False, True):
                    found = ranks.sums_with_norm(parts, residual, norm, two_shots)
                    for normed, total in found:
                        assert torch.equal(total, expected[1])
                        assert torch.equal(normed, expected[0])


@pytest.mark.parametrize("first", [LAST - 3, CLEANED - 3, LAST, 2 * CLEANED - 1])
def test_numbers_begin_again(first: int) -> None:
    with ranks_of(3, first) as ranks:
        for size in (CAPACITY // 2, 8, CAPACITY // 2, 2048, 8, CAPACITY // 2, 16):
            parts = parts_of(3, size)
            assert_all_equal(ranks.sums(parts, two_shots=False), sum_ranks(parts))


def test_replays_of_graphs_count_on() -> None:
    """And sums outside them, between replays."""
    with ranks_of(2) as ranks:
        parts = parts_of(2, 4096)
        outputs: list[list[Tensor]] = [[], []]
        graphs: list[DeviceGraph] = []
        ranks.sums(parts, two_shots=False)

        def record(rank: int, memory: PeerMemory) -> None:
            graph = DeviceGraph(torch.cuda.graph_pool_handle())
            graph.begin()
            try:
                once = memory.sum(parts[rank], two_shots=False)
                outputs[rank] += [once, memory.sum(once, two_shots=True)]
            finally:
                graph.end()
            graphs.append(graph)

        ranks.each(record)
        for _ in range(5):
            for part in parts:
                part.copy_(torch.randn_like(part))
            ranks.each(lambda rank, _: graphs[rank].replay())
            once = sum_ranks(parts)
            assert_all_equal([outputs[0][0], outputs[1][0]], once)
            assert_all_equal([outputs[0][1], outputs[1][1]], sum_ranks([once, once]))
            assert_all_equal(ranks.sums(parts, two_shots=False), once)
        graphs.clear()


def test_what_it_does_not_take_is_refused() -> None:
    with ranks_of(2) as ranks:
        memory = ranks.memories[0]
        for wrong in (
            torch.zeros(CAPACITY // 2 + 8, dtype=BF16, device="cuda"),
            torch.zeros(9, dtype=BF16, device="cuda"),
            torch.zeros(9, dtype=BF16, device="cuda")[1:],
            torch.zeros(8, dtype=torch.int32, device="cuda"),
        ):
            with pytest.raises(RuntimeError, match="vllm_cuda: x must"):
                memory.sum(wrong, two_shots=False)
        alone = PeerMemory(ranks.device, 0, 2, CAPACITY, WAIT_S)
        with pytest.raises(RuntimeError, match="before all peers are open"):
            alone.sum(torch.zeros(8, device="cuda"), two_shots=False)
        alone.close()


ALONE = """
import time, torch
from vllm._extension import load_cuda_ops
from vllm.kernels.all_reduce.cuda import PeerMemory
load_cuda_ops()
device = torch.device("cuda", 0)
ranks = [PeerMemory(device, r, 2, 4096, 0.5) for r in range(2)]
for one in ranks:
    for r, other in enumerate(ranks):
        one.join(r, other)
began = time.monotonic()
ranks[0].sum(torch.zeros(64, device=device), two_shots=False)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("ended after", time.monotonic() - began)
"""


def test_a_rank_that_waits_alone_ends() -> None:
    """In a process of its own, whose device it leaves unusable."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("ended after"), done.stderr
    assert 0.4 < float(done.stdout.split()[-1]) < 20


SIZES = (8, 4096, 262144, 520, 40960, 8, 131072)


def _of_two(rank: int, folder: Path) -> None:
    current_platform.prepare_collectives()
    method = f"file://{folder}/store"
    parallel_state.init_distributed_environment(2, rank, method, backend="nccl")
    parallel_state.initialize_model_parallel(2)
    parallel_state.share_memory()
    group = parallel_state.get_tp_group()
    assert group.peer_sums is not None
    torch.manual_seed(rank)
    device = torch.device("cuda", rank)
    results = []
    for size in SIZES * 3:
        part = torch.randn(size, device=device).to(BF16)
        results.append((part.cpu(), group.all_reduce(part).cpu()))
    part = torch.randn(5, 1024, device=device).to(BF16)
    residual = torch.ones_like(part)
    norm = Norm(torch.ones(1024, dtype=BF16, device=device), 1e-6, False)
    normed, total = group.peer_sums.sum_add_norm(part, residual, norm)
    kernels = current_platform.kernels
    expected = kernels.fused_add_rms_norm(group.all_reduce(part), residual, norm.weight, 1e-6)
    torch.save((results, torch.equal(normed, expected[0]), torch.equal(total, expected[1])),
               folder / f"{rank}.pt")  # fmt: skip
    group.barrier()
    parallel_state.destroy_distributed_environment()


@two_gpus
def test_two_gpus_add_through_each_others_memory(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_of_two, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    (first, *equal), (second, *others) = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    assert all(equal + others)
    for (one, total), (other, same) in zip(first, second, strict=True):
        assert torch.equal(total, same) and torch.equal(total, sum_ranks([one, other]))
