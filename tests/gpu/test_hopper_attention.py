# SPDX-License-Identifier: Apache-2.0
"""Attention of short queries in CUDA C++ against fp64, its bits, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCE, Case, attention_case, check
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.attention.hopper import (
    MAX_ROWS,
    arrivals,
    hopper_attention,
    takes_attention,
)
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.fp8 import FP8
from vllm.kernels.rotary import RotaryProblem

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HEADS = [(16, 4, 256), (32, 8, 128), (24, 4, 256)]
#: decodes and short verifications; those of many sequences are taken with float8 caches alone
FEW = {
    "decode 1": [(1, 5)],
    "decode 3": [(1, 4096), (1, 1), (1, 777)],
    "verify 2": [(2, 300), (1, 65), (2, 2)],
}
MANY = {
    "decode 24": [(1, 4096), (1, 1), (1, 777)] * 8,
    "decode 90": [(1, 200), (1, 1), (1, 777)] * 30,
    "decode 41": [(1, 1500)] * 40 + [(1, 17)],
    "verify 2 of 90": [(2, 300), (1, 65), (2, 2)] * 30,
}
CASES = [
    *(pytest.param(lengths, BF16, id=f"{name}, bf16") for name, lengths in FEW.items()),
    *(pytest.param(lengths, FP8, id=f"{name}, fp8") for name, lengths in (FEW | MANY).items()),
]


def made(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int] = HEADS[0],
    cache: torch.dtype = BF16,
    **options: Any,
) -> Case:
    """A case that the op takes."""
    with torch.device("cuda"):
        case = attention_case(lengths, heads, BF16, "cuda", **options)
    case["kv_cache"] = case["kv_cache"].to(cache)
    assert takes_attention(AttentionProblem(**case))
    return case


def rows_of(kernels: CudaKernels, case: Case) -> Tensor:
    """The output rows of sequences, in a tensor of their own."""
    out = torch.full_like(case["out"], float("nan"))
    kernels.paged_attention(AttentionProblem(**case | dict(out=out)))
    return out[: int(case["query_start_loc"][-1])]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("lengths", "cache"), CASES)
def test_against_reference(
    kernels: CudaKernels,
    lengths: list[tuple[int, int]],
    cache: torch.dtype,
    heads: tuple[int, int, int],
) -> None:
    if max(q for q, _ in lengths) * (heads[0] // heads[1]) > MAX_ROWS:
        pytest.skip("more query rows than the op takes")
    case = made(lengths, heads, cache, padding=3, gated=True)
    if cache == FP8:
        case |= dict(k_scale=0.75, v_scale=1.5)
    check(kernels, "paged_attention", case, (1 if cache == BF16 else 2) * TOLERANCE[BF16])
    assert not arrivals(case["out"].device, case["kv_cache"].shape[3]).any()


@pytest.mark.parametrize("window", [1, 50, 1000])
@pytest.mark.parametrize(("lengths", "cache"), CASES)
def test_sliding_window(
    kernels: CudaKernels, lengths: list[tuple[int, int]], cache: torch.dtype, window: int
) -> None:
    """Blocks below it may be another group's by now: what they hold does not matter."""
    case = made(lengths, cache=cache, window=window)
    triton = rows_of(CudaKernels(), case)
    bits = case["kv_cache"].view(torch.uint8)
    for seq, (query_len, seq_len) in enumerate(lengths):
        freed = case["block_table"][seq, : max(0, seq_len - query_len - window + 1) // 16]
        bits[freed.long()] = 255  # NaN
    result = rows_of(kernels, case)
    assert not result.isnan().any()
    torch.testing.assert_close(result, triton, atol=1e-2, rtol=1e-2)


def test_large_blocks_and_apart_rows(kernels: CudaKernels) -> None:
    case = made([(1, 700), (1, 30)], block_size=48)
    wide = torch.full((*case["out"].shape[:2], 264), float("nan"), dtype=BF16, device="cuda")
    check(kernels, "paged_attention", case | dict(out=wide[..., :256]), TOLERANCE[BF16])
    assert wide[..., 256:].isnan().all()


@pytest.mark.parametrize(("lengths", "cache"), CASES)
def test_the_gate_has_the_bits_of_a_launch_of_its_own(
    kernels: CudaKernels, lengths: list[tuple[int, int]], cache: torch.dtype
) -> None:
    case = made(lengths, cache=cache, gated=True)
    apart = kernels.mul_sigmoid(rows_of(kernels, case | dict(gate=None)), case["gate"])
    assert torch.equal(apart, rows_of(kernels, case).flatten(1))


@pytest.mark.parametrize(("count", "cache"), [(3, BF16), (16, BF16), (40, FP8), (100, FP8)])
def test_a_row_does_not_depend_on_its_neighbours(
    kernels: CudaKernels, count: int, cache: torch.dtype
) -> None:
    lengths = [(1, 3000)] + [(1, 40 * i + 1) for i in range(count - 1)]
    case = made(lengths, cache=cache) | dict(max_seq_len=8192)
    expected = rows_of(kernels, case)[:1].clone()
    for shorter in (1, 17):
        case["seq_lens"][1:] = (case["seq_lens"][1:] // 40 * 3 + shorter).clamp(max=shorter * 40)
        case["seq_lens"][1] = 1
        assert torch.equal(rows_of(kernels, case)[:1], expected)


@pytest.mark.parametrize(("rows", "cache"), [(1, BF16), (3, BF16), (16, BF16), (40, FP8)])
@pytest.mark.usefixtures("own_stream")
def test_replays_give_the_same_bits(kernels: CudaKernels, rows: int, cache: torch.dtype) -> None:
    """Whoever joins, and although launches overlap."""
    case = made([(1, 4000)] * rows, cache=cache, gated=True)
    expected = rows_of(kernels, case).clone()
    graph = torch.cuda.CUDAGraph()
    outs = [torch.empty_like(case["out"]) for _ in range(10)]
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for out in outs:
            kernels.paged_attention(AttentionProblem(**case | dict(out=out)))
    for _ in range(100):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)
    assert not arrivals(case["out"].device, case["kv_cache"].shape[3]).any()


@pytest.mark.parametrize(("rows", "cache"), [(1, BF16), (8, BF16), (40, FP8)])
@pytest.mark.usefixtures("own_stream")
def test_it_waits_for_the_keys_of_this_step(
    kernels: CudaKernels, rows: int, cache: torch.dtype
) -> None:
    """In a graph it starts early, and must not read the newest token before it is written."""
    num_heads, num_kv_heads, head_dim = HEADS[0]
    case = made([(1, 100)] * rows, cache=cache)
    table, newest = case["block_table"], 99
    slots = table[:, newest // 16].long() * 16 + newest % 16
    options = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    qkv = torch.randn(rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=BF16, device="cuda")
    stale = torch.full((rows, num_kv_heads, head_dim), 300.0, dtype=BF16, device="cuda")
    positions = torch.full((rows,), newest, device="cuda")
    angles = torch.randn(128, 64, device="cuda")
    out = torch.empty(rows, num_heads, head_dim, dtype=BF16, device="cuda")

    def step() -> None:
        kernels.write_kv_cache(stale, stale, case["kv_cache"], slots)
        wide = qkv
        for _ in range(4):
            wide = kernels.silu_and_mul(torch.cat([wide, wide], dim=1))
        rotary = RotaryProblem(
            qkv + 0 * wide, positions, angles, None, None, case["kv_cache"], slots,
            gated=False, eps=1e-6, one_plus=True, **options,
        )  # fmt: skip
        query = kernels.qk_norm_rope_cache(rotary)
        kernels.paged_attention(AttentionProblem(**case | dict(query=query, out=out)))

    step()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    for _ in range(50):
        out.fill_(float("nan"))
        kernels.write_kv_cache(stale, stale, case["kv_cache"], slots)
        graph.replay()
        assert torch.equal(out, expected)


def test_wrong_arguments_are_refused(kernels: CudaKernels) -> None:
    case = made([(1, 100)])
    with pytest.raises(RuntimeError, match="query must be bfloat16"):
        hopper_attention(AttentionProblem(**case | dict(query=case["query"].half())))
    with pytest.raises(RuntimeError, match="too many query rows"):
        hopper_attention(AttentionProblem(**case | dict(max_query_len=3)))
    with pytest.raises(RuntimeError, match="kv_cache must be bfloat16 or float8_e4m3fn"):
        short = case["kv_cache"][:, :, :8]
        hopper_attention(AttentionProblem(**case | dict(kv_cache=short)))
