# SPDX-License-Identifier: Apache-2.0
"""Which attention of long queries `vllm_cuda` takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCE, attention_case, check, strided
from vllm.kernels.attention import AttentionProblem, QueryRows, hopper_prefill
from vllm.kernels.attention.hopper_prefill import takes_attention
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.fp8 import FP8

HEADS = (8, 2, 128)
BF16, E5M2 = torch.bfloat16, torch.float8_e5m2


def problem(**changes: Any) -> AttentionProblem:
    """One that the op takes, but for the changes."""
    case = attention_case([(20, 20), (2, 30)], HEADS, BF16, "cpu", gated=True)
    return AttentionProblem(**case | changes)


def heads_of(p: AttentionProblem, head_dim: int) -> dict[str, Any]:
    tensors = {"query": p.query, "kv_cache": p.kv_cache, "out": p.out}
    return {name: tensor[..., :head_dim].contiguous() for name, tensor in tensors.items()}


def cache(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=BF16)


def odd_cache(dtype: torch.dtype, stride: int) -> Tensor:
    """Blocks that lie so many elements apart."""
    return torch.zeros(3, stride).to(dtype)[:, :65536].view(3, 2, 128, 2, 128)


BASE = problem()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="prefill"),
        pytest.param({"gate": None}, id="no gate"),
        pytest.param({"kv_cache": BASE.kv_cache.to(FP8)}, id="fp8 cache"),
        pytest.param(heads_of(BASE, 64), id="heads of 64"),
        pytest.param({"kv_cache": cache(3, 2, 48, 2, 128)}, id="blocks of 48"),
        pytest.param({"sliding_window": 5, "sinks": torch.zeros(8)}, id="window and sinks"),
        pytest.param({"max_query_len": 17}, id="68 rows"),
        pytest.param({"query": strided(BASE.query)}, id="head stride"),
        pytest.param(
            {"kv_cache": cache(3, 2, 16, 8, 128), "max_query_len": 65}, id="a kv head per head"
        ),
    ],
)
def test_what_is_taken(changes: dict[str, Any]) -> None:
    assert takes_attention(problem(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"query": BASE.query.half()}, id="fp16"),
        pytest.param({"kv_cache": BASE.kv_cache.to(E5M2)}, id="e5m2 cache"),
        pytest.param({"kv_cache": odd_cache(BF16, 65541)}, id="odd"),
        pytest.param({"kv_cache": odd_cache(FP8, 65544)}, id="odd, fp8 cache"),
        pytest.param(heads_of(BASE, 96), id="heads of 96"),
        pytest.param({"max_query_len": 16}, id="64 rows"),
        pytest.param({"rows": QueryRows.WHOLE_BLOCK}, id="a drafter's block"),
        pytest.param({"kv_cache": cache(3, 2, 8, 2, 128)}, id="blocks of 8"),
        pytest.param({"query": strided(BASE.query, 4)}, id="head stride"),
        pytest.param({"gate": strided(BASE.gate, 8)[..., 4:132]}, id="gate offset"),
        pytest.param({"out": BASE.out.transpose(1, 2).contiguous().transpose(1, 2)}, id="apart"),
        pytest.param({"seq_lens": torch.zeros(0, dtype=torch.int32)}, id="nothing"),
    ],
)
def test_what_is_left_to_triton(changes: dict[str, Any]) -> None:
    assert not takes_attention(problem(**changes))


def test_many_query_heads_of_a_kv_head_are_left_to_triton() -> None:
    wide = attention_case([(20, 20)], (65, 1, 64), BF16, "cpu")
    assert not takes_attention(AttentionProblem(**wide))


def test_only_what_is_taken_goes_to_the_op(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[AttentionProblem] = []
    recorder = replace(hopper_prefill.paged_attention, run=calls.append, needs=None)
    monkeypatch.setattr(hopper_prefill, "paged_attention", recorder)
    kernels = CudaKernels()
    short = attention_case([(16, 20), (2, 30)], HEADS, torch.float32, device)
    check(kernels, "paged_attention", short, TOLERANCE[torch.float32])
    assert not calls
    taken = AttentionProblem(**attention_case([(17, 20), (2, 30)], HEADS, BF16, device))
    kernels.paged_attention(taken)
    assert len(calls) == 1 and calls[0] is taken
    wide = attention_case([(40, 40)], HEADS, torch.float32, device)
    check(kernels, "paged_attention", wide, TOLERANCE[torch.float32])
    assert len(calls) == 1
