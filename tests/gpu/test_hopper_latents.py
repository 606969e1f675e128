# SPDX-License-Identifier: Apache-2.0
"""Attention to latents in CUDA C++ against fp64, its bits, and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import Case, check, latent_case
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.latent_attention.hopper import takes_latents

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: with products before and after that round
TOLERANCE = 1.5e-2
#: DeepSeek-V3's heads of one of eight ranks, Kimi-Linear's, DeepSeek-V3's, and an odd number
HEADS = [16, 32, 128, 5]
CASES = {
    "one key": [(1, 1)],
    "a decode": [(1, 4097)],
    "decodes": [(1, 64), (1, 1), (1, 777), (1, 63), (1, 65), (1, 200)],
    "many decodes": [(1, 300), (1, 1), (1, 1777)] * 50,
    "verification": [(4, 300), (1, 65), (4, 4), (3, 1000)],
    "few more queries": [(40, 40), (17, 129), (1, 9)],
    # Two shares of a sequence, which a cluster joins; some have one.
    "decodes in pairs": [(1, 300), (1, 4097), (1, 1)] * 20,
    "verification in pairs": [(4, 3000), (2, 5), (4, 700)] * 11,
}
#: about the largest score of a row at a position, in powers of two, up to a factor of 0.8
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "growing": lambda position: position / 20,
    "growing in jumps": lambda position: position // 500 * 100,
    "falling": lambda position: 100 - position / 20,
    "far below zero": lambda position: -1000 - position % 7,
    "a first tile far below": lambda position: torch.where(position < 64, -1000, 0),
    "a last key far above": lambda position: torch.where(position < 699, -100, 1000),
}


def made(lengths: list[tuple[int, int]], heads: int = 32, **options: Any) -> Case:
    """A case that the op takes."""
    with torch.device("cuda"):
        case = latent_case(lengths, (heads, 128, 64, 128, 512), BF16, "cuda", **options)
    assert takes_latents(LatentAttentionProblem(**case))
    return case


def rows_of(kernels: CudaKernels, case: Case) -> Tensor:
    """The output rows of sequences, in a tensor of their own."""
    out = torch.full_like(case["out"], float("nan"))
    kernels.latent_attention(LatentAttentionProblem(**case | dict(out=out)))
    return out[: int(case["query_start_loc"][-1])]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_against_reference(
    kernels: CudaKernels, lengths: list[tuple[int, int]], heads: int
) -> None:
    """What lies behind the last key of a block is NaN."""
    check(kernels, "latent_attention", made(lengths, heads, padding=3), TOLERANCE)


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_peaks(kernels: CudaKernels, score: Callable[[Tensor], Tensor]) -> None:
    """Sums are scaled only when a score is far above the largest one before."""
    case = made([(1, 3000), (4, 700), (1, 65)])
    case["query"][..., 128] = 8
    size = case["cache"].shape[1]
    for table, length in zip(case["block_table"], case["seq_lens"].tolist(), strict=True):
        position = torch.arange(length, device="cuda")
        block = table[position // size].long()
        case["cache"][block, position % size, 512] = score(position).to(BF16)
    check(kernels, "latent_attention", case, TOLERANCE)


@pytest.mark.parametrize("block_size", [48, 64, 128])
def test_large_blocks(kernels: CudaKernels, block_size: int) -> None:
    case = made([(1, 700), (4, 30), (1, 129)], block_size=block_size)
    check(kernels, "latent_attention", case, TOLERANCE)


@pytest.mark.parametrize("bound", [64, 512, 10**6])
def test_any_number_of_shares_gives_the_same_result(kernels: CudaKernels, bound: int) -> None:
    case = made([(4, 64), (1, 5), (2, 64)]) | dict(max_seq_len=bound)
    check(kernels, "latent_attention", case, TOLERANCE)
    case = made([(1, 5000), (2, 3100)]) | dict(max_seq_len=max(bound, 5000))
    check(kernels, "latent_attention", case, TOLERANCE)


@pytest.mark.parametrize("count", [2, 16, 64, 100, 200])
def test_a_row_does_not_depend_on_its_neighbours(kernels: CudaKernels, count: int) -> None:
    lengths = [(1, 3000)] + [(1, 40 * i + 1) for i in range(count - 1)]
    case = made(lengths) | dict(max_seq_len=8192)
    expected = rows_of(kernels, case)[:1].clone()
    for shorter in (1, 17):
        case["seq_lens"][1:] = (case["seq_lens"][1:] // 40 * 3 + shorter).clamp(max=shorter * 40)
        case["seq_lens"][1] = 1
        assert torch.equal(rows_of(kernels, case)[:1], expected)


@pytest.mark.parametrize("rows", [1, 3, 40, 64, 140])
@pytest.mark.usefixtures("own_stream")
def test_replays_give_the_same_bits(kernels: CudaKernels, rows: int) -> None:
    case = made([(1, 4000)] * rows)
    expected = rows_of(kernels, case).clone()
    graph = torch.cuda.CUDAGraph()
    outs = [torch.empty_like(case["out"]) for _ in range(4)]
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for out in outs:
            kernels.latent_attention(LatentAttentionProblem(**case | dict(out=out)))
    for _ in range(50):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.usefixtures("own_stream")
def test_a_replay_takes_other_lengths(kernels: CudaKernels) -> None:
    """Up to the bound of its capture, and sequences that have ended."""
    case = made([(1, 4000), (1, 900), (1, 2100)])
    out = torch.empty_like(case["out"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kernels.latent_attention(LatentAttentionProblem(**case | dict(out=out)))
    for lengths in ([1, 2, 3], [3999, 900, 64], [65, 0, 2048]):
        case["seq_lens"].copy_(torch.tensor(lengths))
        graph.replay()
        expected = rows_of(kernels, case)
        live = [i for i, length in enumerate(lengths) if length]
        assert torch.equal(out[live], expected[live]) and not out[live].isnan().any()


@pytest.mark.usefixtures("own_stream")
def test_what_follows_waits_for_shares_that_need_no_joining(kernels: CudaKernels) -> None:
    """The kernel that joins starts early, and has nothing to do for sequences of one share."""
    case = made([(1, 250)] * 20) | dict(max_seq_len=8192)
    expected = rows_of(kernels, case | dict(max_seq_len=250)).clone()
    for _ in range(20):
        assert torch.equal(rows_of(kernels, case), expected)
