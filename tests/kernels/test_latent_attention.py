# SPDX-License-Identifier: Apache-2.0
"""Latent attention: every way to compute it against the fp64 reference, and what chooses one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import check, error_ratio, latent_case
from vllm import decisions
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.latent_attention import LatentAttentionProblem, expanded, expansion_pays, triton
from vllm.kernels.latent_attention.expanded import expanded_attention, takes_expanded
from vllm.kernels.naive import NaiveKernels

CPU, NAIVE = CpuKernels(), NaiveKernels()
#: heads, dimensions of a key of its own, shared ones, of a value, of the latent
SIZES = [(4, 16, 8, 16, 32), (3, 12, 4, 20, 40)]
DECODE = [(1, 1), (1, 17), (1, 130)]
VERIFY = [(4, 4), (4, 70)]
PREFILL = [(1, 20), (9, 9), (7, 70)]
#: those of a GPU round the query and the result once more where they are absorbed
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def test_reference_is_attention_over_keys_and_values_of_its_own() -> None:
    """Made of the latents beforehand, token by token."""
    heads, nope, shared, value, latent = SIZES[0]
    case = latent_case(PREFILL, SIZES[0], torch.float64, "cpu")
    NAIVE.latent_attention(LatentAttentionProblem(**case))
    cache = case["cache"]
    kv_cache = torch.zeros(len(cache), 2, 16, heads, nope + shared, dtype=torch.float64)
    for head, weight in enumerate(case["kv_b"]):
        kv_cache[:, 0, :, head, :nope] = cache[..., :latent] @ weight[:nope].T
        kv_cache[:, 0, :, head, nope:] = cache[..., latent:]
        kv_cache[:, 1, :, head, :value] = cache[..., :latent] @ weight[nope:].T
    names = ("block_table", "seq_lens", "query_start_loc", "max_query_len", "max_seq_len", "scale")
    shared_fields = {name: case[name] for name in names}
    out = torch.empty_like(case["query"])
    NAIVE.paged_attention(
        AttentionProblem(case["query"], kv_cache, **shared_fields, sliding_window=None, out=out)
    )
    assert error_ratio(case["out"], out[..., :value]) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_cpu(size: tuple[int, ...], dtype: torch.dtype) -> None:
    case = latent_case(DECODE + VERIFY + PREFILL, size, dtype, "cpu", padding=2)
    check(CPU, "latent_attention", case, TOLERANCE[dtype])
    assert "latent attention on the CPU" in [one.what for one in decisions.decisions()]


def test_cpu_takes_a_batch_of_padding_alone() -> None:
    """No sequence has a block: as in the steps that a capture records."""
    case = latent_case(DECODE, SIZES[0], torch.float32, "cpu")
    case["seq_lens"].zero_()
    # What rows of padding hold afterwards is nobody's; the kernel takes them.
    CPU.latent_attention(LatentAttentionProblem(**case))


def test_cpu_bits_do_not_depend_on_the_cut_or_the_batch() -> None:
    """A prompt in pieces, beside another sequence, token by token: the same bits."""
    case = latent_case([(150, 150), (70, 90)], SIZES[0], torch.float32, "cpu")
    whole = LatentAttentionProblem(**case)
    CPU.latent_attention(whole)
    for cuts in ([0, 1, 65, 150], [0, 129, *range(130, 151)]):
        for start, end in pairwise(cuts):
            out = torch.empty_like(whole.out[start:end])
            CPU.latent_attention(
                replace(
                    whole,
                    query=whole.query[start:end],
                    block_table=whole.block_table[:1],
                    seq_lens=torch.tensor([end], dtype=torch.int32),
                    query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
                    out=out,
                )
            )
            assert torch.equal(out, whole.out[start:end])


@pytest.mark.parametrize(
    ("lengths", "size", "dtype"),
    [
        (DECODE, SIZES[0], torch.float32),
        (VERIFY, SIZES[1], torch.float16),
        (PREFILL, SIZES[0], torch.float32),
    ],
    ids=["decode", "verify", "prefill"],
)
def test_absorbed(
    size: tuple[int, ...], lengths: list[tuple[int, int]], dtype: torch.dtype, device: str
) -> None:
    case = latent_case(lengths, size, dtype, device, padding=1)
    check(CudaKernels(), "latent_attention", case, TOLERANCE[dtype])


@pytest.mark.parametrize("bound", [1, 10**6])
def test_any_number_of_shares_gives_the_same_result(
    bound: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's bound changes it; rows of one query see different shares."""
    seen: list[int] = []
    splits = triton.num_splits
    monkeypatch.setattr(triton, "num_splits", lambda *a: seen.append(splits(*a)) or seen[-1])
    case = latent_case([(4, 67), (4, 130), (1, 5)], SIZES[0], torch.float32, device)
    case["max_seq_len"] = bound
    check(CudaKernels(), "latent_attention", case, TOLERANCE[torch.float32])
    assert (seen[0] == 1) == (bound == 1)


@pytest.mark.parametrize(
    ("lengths", "room"),
    [((40, 40), 10**6), ((34, 77), 2 * 80)],
    ids=["new", "two heads at once"],
)
def test_expanded(
    lengths: tuple[int, int], room: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads at once or two: the same bits."""
    passes: list[int] = []
    make = expanded.keys_and_values

    def noted(p: LatentAttentionProblem, rows: Tensor, kv_b: Tensor) -> Tensor:
        passes.append(len(kv_b))
        return make(p, rows, kv_b)

    monkeypatch.setattr(expanded, "keys_and_values", noted)
    case = latent_case([lengths], SIZES[0], torch.float32, device) | dict(room=room)
    check(CudaKernels(), "latent_attention", case, TOLERANCE[torch.float32])
    assert sum(passes) == 4 and max(passes) == min(4, room // (-(-lengths[1] // 16) * 16))
    once = replace(LatentAttentionProblem(**case), out=torch.empty_like(case["out"]), room=10**6)
    expanded_attention(once)
    assert torch.equal(once.out, case["out"])


def test_who_is_expanded() -> None:
    """Kimi-Linear's and DeepSeek's sizes: from 171 queries on."""
    assert not expansion_pays(170, 512, 128, 128) and expansion_pays(171, 512, 128, 128)
    assert not expansion_pays(10**6, 32, 32, 32), "a head as wide as its latent"
    problem = LatentAttentionProblem(**latent_case([(40, 90)], SIZES[0], torch.float32, "cpu"))
    assert takes_expanded(problem) and takes_expanded(replace(problem, room=96))
    assert not takes_expanded(replace(problem, room=95)), "not even one head has room"
    assert not takes_expanded(replace(problem, query=problem.query[:39])), "a row is padding"
    short = latent_case([(32, 90)], SIZES[0], torch.float32, "cpu")
    assert not takes_expanded(LatentAttentionProblem(**short))
    two = latent_case([(40, 90), (40, 40)], SIZES[0], torch.float32, "cpu")
    assert not takes_expanded(LatentAttentionProblem(**two))
    wide_values = latent_case([(90, 90)], (3, 12, 4, 20, 80), torch.float32, "cpu")
    assert not takes_expanded(LatentAttentionProblem(**wide_values))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize(
    "lengths",
    [[(1, 4096), (1, 1), (1, 777)], [(1, 300)] * 90, [(4, 2004)] * 5, [(1500, 4000)], [(90, 3000)]],
    ids=["decode", "many", "verify", "expanded", "absorbed"],
)
def test_realistic_sizes(lengths: list[tuple[int, int]], heads: int, device: str) -> None:
    case = latent_case(lengths, (heads, 128, 64, 128, 512), torch.bfloat16, device, padding=1)
    check(CudaKernels(), "latent_attention", case, TOLERANCE[torch.bfloat16])
