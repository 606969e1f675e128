# SPDX-License-Identifier: Apache-2.0
"""Which attention of short queries `vllm_cuda` takes, and into how many shares it cuts keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCE, attention_case, check, strided
from vllm.kernels.attention import AttentionProblem, hopper
from vllm.kernels.attention.hopper import (
    FEW_SHARE_KEYS,
    MANY_SHARE_KEYS,
    MAX_SEQUENCES,
    MAX_SHARES,
    SHARED_NUMBERS,
    num_shares,
    takes_attention,
)
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.fp8 import FP8
from vllm.kernels.triton.configs import shipped

HEADS = (8, 2, 128)
BF16 = torch.bfloat16
CHIP = 132
ROW = 16 * 256  # numbers of a token's output


@pytest.fixture(autouse=True)
def _chip(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = replace(shipped(None), multiprocessors=CHIP)
    monkeypatch.setattr(hopper, "device_configs", lambda device: chip)


def problem(*, num_seqs: int = 1, **changes: Any) -> AttentionProblem:
    """One that the op takes, but for the changes."""
    case = attention_case([(1, 20)], HEADS, BF16, "cpu", gated=True)
    seq_lens = torch.zeros(num_seqs, dtype=torch.int32)
    return AttentionProblem(**case | dict(seq_lens=seq_lens) | changes)


def heads_of(p: AttentionProblem, head_dim: int) -> dict[str, Tensor]:
    tensors = {"query": p.query, "kv_cache": p.kv_cache, "out": p.out}
    return {name: tensor[..., :head_dim].contiguous() for name, tensor in tensors.items()}


BASE = problem()
FP8_CACHE = torch.zeros(3, 2, 16, 2, 128).to(FP8)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="decode"),
        pytest.param({"gate": None}, id="no gate"),
        pytest.param({"kv_cache": FP8_CACHE}, id="fp8 cache"),
        pytest.param({"kv_cache": torch.zeros(3, 2, 32, 2, 128, dtype=BF16)}, id="blocks of 32"),
        pytest.param({"max_query_len": 2}, id="8 rows"),
        pytest.param({"num_seqs": 33}, id="two shares each"),
        pytest.param({"num_seqs": MAX_SEQUENCES, "kv_cache": FP8_CACHE}, id="many, fp8 cache"),
    ],
)
def test_what_is_taken(changes: dict[str, Any]) -> None:
    assert takes_attention(problem(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"query": BASE.query.half()}, id="fp16"),
        pytest.param({"kv_cache": BASE.kv_cache.half()}, id="fp16 cache"),
        pytest.param(heads_of(BASE, 64), id="heads of 64"),
        pytest.param({"max_query_len": 3}, id="12 rows"),
        pytest.param({"sinks": torch.zeros(8)}, id="sinks"),
        pytest.param({"num_seqs": 34}, id="a share each"),
        pytest.param({"kv_cache": torch.zeros(3, 2, 8, 2, 128, dtype=BF16)}, id="blocks of 8"),
        pytest.param({"num_seqs": MAX_SEQUENCES + 1, "kv_cache": FP8_CACHE}, id="too many"),
        pytest.param({"query": strided(BASE.query, 2)}, id="head stride"),
        pytest.param({"gate": strided(BASE.gate, 8)[..., 2:130]}, id="gate offset"),
        pytest.param({"out": BASE.out.transpose(1, 2).contiguous().transpose(1, 2)}, id="apart"),
    ],
)
def test_what_is_left_to_triton(changes: dict[str, Any]) -> None:
    assert not takes_attention(problem(**changes))


def test_few_sequences_fill_the_chip_once() -> None:
    assert num_shares(1, 4, 16384, ROW, CHIP) == (MAX_SHARES, FEW_SHARE_KEYS)
    assert num_shares(2, 4, 16384, ROW, CHIP) == (16, FEW_SHARE_KEYS)
    assert num_shares(8, 4, 16384, ROW, CHIP) == (4, FEW_SHARE_KEYS)
    assert num_shares(16, 4, 16384, ROW, CHIP) == (2, FEW_SHARE_KEYS)
    assert num_shares(1, 4, FEW_SHARE_KEYS + 1, ROW, CHIP) == (2, FEW_SHARE_KEYS)


def test_many_sequences_take_turns() -> None:
    assert num_shares(17, 4, 16384, ROW, CHIP) == (16, MANY_SHARE_KEYS)
    assert num_shares(64, 4, MANY_SHARE_KEYS, ROW, CHIP) == (1, MANY_SHARE_KEYS)
    assert num_shares(64, 4, MANY_SHARE_KEYS + 1, ROW, CHIP) == (2, MANY_SHARE_KEYS)


@pytest.mark.parametrize("sequences", [17, 64, 256, 2048])
def test_shares_leave_memory_for_other_things(sequences: int) -> None:
    splits, _ = num_shares(sequences, 4, 2**20, ROW, CHIP)
    assert splits == 1 or splits * sequences * ROW <= SHARED_NUMBERS


def test_only_what_is_taken_goes_to_the_op(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[AttentionProblem] = []
    recorder = replace(hopper.paged_attention, run=calls.append, needs=None)
    monkeypatch.setattr(hopper, "paged_attention", recorder)
    kernels = CudaKernels()
    case = attention_case([(1, 20), (2, 30)], (4, 2, 128), torch.float32, device)
    check(kernels, "paged_attention", case, TOLERANCE[torch.float32])
    assert not calls
    case = attention_case([(1, 20), (2, 30)], (4, 2, 128), BF16, device)
    taken = AttentionProblem(**case | dict(k_scale=0.5, v_scale=3.0, sliding_window=7))
    kernels.paged_attention(taken)
    assert len(calls) == 1 and calls[0] is taken
    long = attention_case([(9, 20)], (4, 2, 128), torch.float32, device)
    check(kernels, "paged_attention", long, TOLERANCE[torch.float32])
    assert len(calls) == 1
