# SPDX-License-Identifier: Apache-2.0
"""Attention of long queries in CUDA C++ against fp64, its bits, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCE, Case, attention_case, check
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.attention.hopper_prefill import (
    counter,
    hopper_attention,
    takes_attention,
)
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.fp8 import FP8

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CACHES = [pytest.param(BF16, id="bf16"), pytest.param(FP8, id="fp8")]
SCALES = {"k_scale": 0.75, "v_scale": 1.5}
#: all head sizes, groups that divide a warpgroup's 64 rows and groups that do not
HEADS = [
    (16, 4, 256),
    (24, 4, 256),
    (32, 8, 128),
    (5, 1, 128),
    (4, 4, 128),
    (64, 8, 64),
    (14, 2, 64),
]
LENGTHS = {
    "even": [(256, 256)],
    "ragged": [(700, 2000), (1, 50), (130, 130)],
    "long prefix": [(33, 3001), (250, 777)],
    "odd": [(127, 127), (129, 129), (1, 1), (300, 315), (66, 1024), (2, 3)],
    "many": [(20 + 3 * i, 20 + 7 * i) for i in range(40)],
    # so many tokens of a sequence on average that pairs of thread blocks share keys
    "shared": [(1500, 1500), (1100, 2005)],
}
WIDE_HEADS = [(16, 4, 256), (32, 8, 128), (64, 8, 64)]
CASES = [pytest.param(lengths, id=name) for name, lengths in LENGTHS.items()]


def made(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int] = HEADS[0],
    cache: torch.dtype = BF16,
    **options: Any,
) -> Case:
    """A case that the op takes; where nothing is kept its cache holds NaN."""
    with torch.device("cuda"):
        case = attention_case(lengths, heads, BF16, "cuda", **options)
    if cache == FP8:
        case |= SCALES | dict(kv_cache=converted(case["kv_cache"], FP8))
    assert takes_attention(AttentionProblem(**case))
    return case


def converted(kv_cache: Tensor, dtype: torch.dtype) -> Tensor:
    """The same blocks in an arena of another dtype, between them NaN."""
    arena = torch.full((len(kv_cache), kv_cache.stride(0)), float("nan"), device="cuda").to(dtype)
    strides, offset = kv_cache.stride(), kv_cache.storage_offset()
    return arena.as_strided(kv_cache.shape, strides, offset).copy_(kv_cache)


def rows_of(kernels: CudaKernels, case: Case) -> Tensor:
    """The output rows of sequences, in a tensor of their own."""
    out = torch.full_like(case["out"], float("nan"))
    kernels.paged_attention(AttentionProblem(**case | dict(out=out)))
    return out[: int(case["query_start_loc"][-1])]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", CASES)
def test_against_reference(
    kernels: CudaKernels,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    cache: torch.dtype,
) -> None:
    case = made(lengths, heads, cache, padding=3, gated=True)
    check(kernels, "paged_attention", case, TOLERANCE[BF16])
    assert not counter(case["out"].device).any()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", WIDE_HEADS, ids=str)
@pytest.mark.parametrize("window", [1, 100, 1000])
@pytest.mark.parametrize("lengths", CASES)
def test_sliding_window_and_sinks(
    kernels: CudaKernels,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    window: int,
    cache: torch.dtype,
) -> None:
    """Blocks below it may be another group's by now: what they hold does not matter."""
    case = made(lengths, heads, cache, window=window) | dict(
        sinks=torch.randn(heads[0], device="cuda")
    )
    triton = rows_of(CudaKernels(), case)
    bits = case["kv_cache"].view(torch.uint8)
    for seq, (query_len, seq_len) in enumerate(lengths):
        freed = case["block_table"][seq, : max(0, seq_len - query_len - window + 1) // 16]
        bits[freed.long()] = 255  # NaN
    result = rows_of(kernels, case)
    assert not result.isnan().any()
    torch.testing.assert_close(result, triton, atol=1e-2, rtol=1e-2)
    check(kernels, "paged_attention", case, TOLERANCE[BF16])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", WIDE_HEADS, ids=str)
@pytest.mark.parametrize("growth", [40.0, 110.0, 300.0])
@pytest.mark.parametrize("window", [None, 650])
def test_scores_that_grow(
    kernels: CudaKernels,
    heads: tuple[int, int, int],
    growth: float,
    window: int | None,
    cache: torch.dtype,
) -> None:
    """Some rows find keys later whose scores are so much larger (in nats) that weights stay as they
    are, are made smaller, or leave the range of a float."""
    lengths = [(600, 900), (100, 100)]
    case = made(lengths, heads, gated=True, window=window)
    num_heads, num_kv_heads, head_dim = heads
    towards = torch.nn.functional.normalize(torch.randn(num_kv_heads, head_dim), dim=-1)
    case["query"][::3] += 8 * towards.repeat_interleave(num_heads // num_kv_heads, 0).cuda()
    large = (towards * growth * head_dim**0.5 / 8).cuda()
    for seq, (_, seq_len) in enumerate(lengths):
        for key in (7, seq_len // 3):
            block = case["block_table"][seq, key // 16]
            case["kv_cache"][block, 0, key % 16] += large
    case["sinks"] = torch.randn(num_heads, device="cuda")
    if cache == FP8:
        case |= SCALES | dict(kv_cache=converted(case["kv_cache"], FP8))
    check(kernels, "paged_attention", case, TOLERANCE[BF16])


@pytest.mark.parametrize("cache", CACHES)
def test_large_blocks_and_apart_rows(kernels: CudaKernels, cache: torch.dtype) -> None:
    case = made([(600, 700), (30, 30)], cache=cache, block_size=48)
    wide = torch.full((*case["out"].shape[:2], 264), float("nan"), dtype=BF16, device="cuda")
    check(kernels, "paged_attention", case | dict(out=wide[..., :256]), TOLERANCE[BF16])
    assert wide[..., 256:].isnan().all()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_gate_has_the_bits_of_a_launch_of_its_own(
    kernels: CudaKernels, heads: tuple[int, int, int]
) -> None:
    case = made(LENGTHS["ragged"], heads, gated=True)
    apart = kernels.mul_sigmoid(rows_of(kernels, case | dict(gate=None)), case["gate"])
    assert torch.equal(apart, rows_of(kernels, case).flatten(1))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", WIDE_HEADS, ids=str)
def test_a_row_depends_neither_on_its_neighbours_nor_on_where_a_prompt_is_cut(
    kernels: CudaKernels, heads: tuple[int, int, int], cache: torch.dtype
) -> None:
    """Nor on whether thread blocks share keys, as those of the whole and of its middle do."""
    case = made([(2100, 2100), (1333, 1500), (77, 77)], heads, cache)
    expected = rows_of(kernels, case)[:2100]
    for begin, end in ((0, 2100), (0, 300), (300, 1777), (1777, 2100)):
        alone = case | dict(
            query=case["query"][begin:end],
            out=case["out"][begin:end],
            block_table=case["block_table"][:1],
            seq_lens=torch.tensor([end], dtype=torch.int32, device="cuda"),
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
            max_query_len=end - begin,
            max_seq_len=end,
        )
        assert torch.equal(rows_of(kernels, alone), expected[begin:end])


@pytest.mark.parametrize("heads", WIDE_HEADS, ids=str)
@pytest.mark.parametrize("lengths", ["ragged", "shared"])
def test_a_float8_cache_gives_the_bits_of_a_bfloat16_one_with_its_values(
    kernels: CudaKernels, lengths: str, heads: tuple[int, int, int]
) -> None:
    case = made(LENGTHS[lengths], heads, FP8, window=1200)
    every = torch.arange(256, dtype=torch.uint8, device="cuda").view(FP8)
    codes = every[~every.float().isnan()]
    drawn = torch.randint(len(codes), case["kv_cache"].shape, device="cuda")
    case["kv_cache"].copy_(codes.view(torch.uint8)[drawn].view(FP8))
    found = rows_of(kernels, case)
    wide = converted(case["kv_cache"], BF16)
    assert torch.equal(found, rows_of(kernels, case | dict(kv_cache=wide)))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.usefixtures("own_stream")
def test_replays_give_the_same_bits(kernels: CudaKernels, cache: torch.dtype) -> None:
    case = made([(2500, 3000), (700, 700), (64, 3000)], cache=cache)
    expected = rows_of(kernels, case).clone()
    graph = torch.cuda.CUDAGraph()
    outs = [torch.empty_like(case["out"]) for _ in range(5)]
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for out in outs:
            kernels.paged_attention(AttentionProblem(**case | dict(out=out)))
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)
    assert not counter(case["out"].device).any()


def test_wrong_arguments_are_refused(kernels: CudaKernels) -> None:
    case = made([(100, 100)])
    with pytest.raises(RuntimeError, match="query must be bfloat16"):
        hopper_attention(AttentionProblem(**case | dict(query=case["query"].half())))
    with pytest.raises(RuntimeError, match="kv_cache must be bfloat16 or float8_e4m3fn"):
        short = case["kv_cache"][:, :, :8]
        hopper_attention(AttentionProblem(**case | dict(kv_cache=short)))
    with pytest.raises(RuntimeError, match="scale must be"):
        hopper_attention(AttentionProblem(**case | dict(scale=0.0)))
    with pytest.raises(RuntimeError, match="head sizes are 64, 128 and 256"):
        narrow = made([(100, 100)], (8, 2, 128))
        parts = {name: narrow[name][..., :96] for name in ("query", "out")}
        parts["kv_cache"] = narrow["kv_cache"][..., :96].contiguous()
        hopper_attention(AttentionProblem(**narrow | parts))
