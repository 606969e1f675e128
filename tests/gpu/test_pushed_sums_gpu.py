# SPDX-License-Identifier: Apache-2.0
"""Large sums that copy engines push: their steps on one GPU, and ranks with a GPU each. The order
of steps without a GPU: test_pushed_sums.py."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.pushed_sums import (
    LargestSum,
    PushedPair,
)
from vllm.kernels.all_reduce.cuda import OPS, PeerMemory
from vllm.kernels.all_reduce.naive import sum_ranks
from vllm.kernels.all_reduce.pair_norm import add_pair_norm, takes_pair
from vllm.kernels.residual_stream import Norm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.platforms import current_platform

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
NORM = (1e-6, True)
#: of two ranks that are on one GPU
COLUMNS_OF_ONE = 1024
LARGEST = LargestSum(128, COLUMNS_OF_ONE, 4)


@pytest.fixture(scope="module", autouse=True)
def _ops() -> None:
    if not OPS.choose(torch.cuda.get_device_capability()):
        pytest.skip("the kernels need compute capability 9.0 and a build of the CUDA ops")


@pytest.fixture
def ranks() -> Iterator[list[PeerMemory]]:
    """Two of one GPU, which call one step after the other."""
    device = torch.device("cuda", 0)
    made = [
        PeerMemory(device, rank, 2, 4096, 20.0, push_bytes=LARGEST.push_bytes) for rank in (0, 1)
    ]
    for memory in made:
        for rank, other in enumerate(made):
            memory.join(rank, other)
    yield made
    torch.cuda.synchronize()
    for memory in made:
        memory.close()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_what_is_pushed_arrives_before_its_flag(
    ranks: list[PeerMemory], dtype: torch.dtype
) -> None:
    sender, receiver = ranks
    for turn, rows in enumerate((96, 3, 1, 96), 1):
        sent = torch.randn(rows, COLUMNS_OF_ONE, device="cuda").to(dtype)
        sender.push(sent, receiver.rank, 1024)
        for memory in ranks:
            memory.signal(5, turn)
        receiver.wait_for(5, turn)
        assert torch.equal(receiver.pushed(1024, rows, COLUMNS_OF_ONE, dtype), sent)


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("columns", [520, 1024, 2560, 5120, 8192])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_norm_of_two_parts_has_the_bits_of_separate_kernels(
    dtype: torch.dtype, columns: int, one_plus: bool
) -> None:
    torch.manual_seed(0)
    kernels = current_platform.kernels
    for rows in (1, 1025):
        own, other, residual = torch.randn(3, rows, columns, device="cuda").to(dtype)
        assert takes_pair(residual)
        norm = Norm(torch.randn(columns, device="cuda").to(dtype), 1e-6, one_plus)
        expected = kernels.fused_add_rms_norm(
            sum_ranks([own, other]), residual, norm.weight, norm.eps, one_plus=one_plus
        )
        out, total = torch.empty_like(residual), torch.empty_like(residual)
        add_pair_norm(own, other, residual, norm, out, total)
        assert torch.equal(total, expected[1]) and torch.equal(out, expected[0])


def test_what_it_does_not_take_is_refused(ranks: list[PeerMemory]) -> None:
    memory, _ = ranks
    rows = torch.zeros(4, 64, dtype=BF16, device="cuda")
    with pytest.raises(RuntimeError, match="no memory for"):
        memory.push(rows, 1, LARGEST.push_bytes)
    with pytest.raises(RuntimeError, match="to another rank"):
        memory.push(rows, 0, 0)
    with pytest.raises(RuntimeError, match="no such flag"):
        memory.signal(32, 1)
    with pytest.raises(RuntimeError, match="rows must"):
        memory.push(rows.T, 1, 0)
    with pytest.raises(RuntimeError, match="float32, float16 or bfloat16"):
        memory.push(rows.to(torch.int16), 1, 0)
    with pytest.raises(ValueError, match="bytes 0 to"):
        memory.pushed(0, LARGEST.rows, 3 * LARGEST.columns, torch.float32)
    few = torch.zeros(4, 512, dtype=BF16, device="cuda")
    with pytest.raises(RuntimeError, match="more columns than it is made for"):
        add_pair_norm(few, few, few, Norm(few[0], *NORM), few, few)
    with pytest.raises(RuntimeError, match="residual must"):
        add_pair_norm(rows, rows, few, Norm(rows[0], *NORM), rows, rows)


# ---- a GPU each ----------------------------------------------------------------------------------

ROWS, COLUMNS, INNER = 4097, 2048, 1024


def _of_two(rank: int, folder: Path) -> None:
    """Layers of a stream, whose branches are pushed; beside each its parts, gathered."""
    current_platform.prepare_collectives()
    method = f"file://{folder}/store"
    parallel_state.init_distributed_environment(2, rank, method, backend="nccl")
    parallel_state.initialize_model_parallel(2)
    parallel_state.share_memory(20, LargestSum(ROWS, COLUMNS, 2))
    group, device = parallel_state.get_tp_group(), torch.device("cuda", rank)
    kernels = current_platform.kernels
    torch.manual_seed(rank)
    with torch.device(device), torch.no_grad():
        layers = [
            RowParallelLinear(INNER * 2, COLUMNS, bias=False, params_dtype=BF16) for _ in range(8)
        ]
        for layer in layers:
            layer.weight.normal_(std=INNER**-0.5)
        inputs = [torch.randn(ROWS, INNER).to(BF16) for _ in layers]
        torch.manual_seed(99)
        stream = torch.randn(ROWS, COLUMNS).to(BF16)
        norm = Norm(torch.randn(COLUMNS).to(BF16), *NORM)
        equal = []
        for layer, x in zip(layers * 4, inputs * 4, strict=True):
            branch = layer.add_to(stream, x)
            assert isinstance(branch.branch, PushedPair)
            normed, total = kernels.enter(branch, norm)
            # Of the same runs of rows, for the bits of a product may depend on their number.
            half = ROWS // 2
            part = torch.cat(
                [layer.quant_method.apply(layer, run, None) for run in (x[:half], x[half:])]
            )
            every = [torch.empty_like(part) for _ in range(2)]
            torch.distributed.all_gather(every, part)
            expected = kernels.fused_add_rms_norm(
                sum_ranks(every), stream, norm.weight, norm.eps, one_plus=True
            )
            equal.append(torch.equal(total, expected[1]) and torch.equal(normed, expected[0]))
            stream = total
    torch.save(equal, folder / f"{rank}.pt")
    group.barrier()
    parallel_state.destroy_distributed_environment()


def test_gpus_push_rows_to_each_other(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_of_two, args=(rank, tmp_path)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    for rank in (0, 1):
        equal = torch.load(tmp_path / f"{rank}.pt")
        assert len(equal) == 32 and all(equal)
