# SPDX-License-Identifier: Apache-2.0
"""Attention sinks on every platform: one more score of each softmax, without a value."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import TOLERANCE, Case, attention_case, check, error_ratio, widen
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.attention.naive import attend, paged_attention
from vllm.kernels.attention.triton_decode import SPLIT_KEYS, Shares, decode_attention
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.triton.tile_files import Tile

DECODES = [(1, 1), (1, 200), (1, 33)]
PREFILLS = [(70, 70), (1, 9), (20, 150)]


def case_of(
    lengths: list[tuple[int, int]], dtype: torch.dtype, device: str, window: int | None = None
) -> Case:
    heads = (8, 2, 16)
    case = attention_case(lengths, heads, dtype, device, window=window, padding=1)
    # Some take nearly everything, some nearly nothing.
    return case | dict(sinks=torch.linspace(-4, 6, 8, device=device))


def test_definition() -> None:
    """Weights are exponentials over their sum with the sink's; a low sink changes nothing."""
    query, key, value = torch.randn(3, 5, 2, 4, dtype=torch.float64)
    sinks = torch.tensor([0.5, -1e9], dtype=torch.float64)
    found = attend(query, key, value, 0.5, None, sinks=sinks)
    plain = attend(query, key, value, 0.5, None)
    assert torch.equal(found[:, 1], plain[:, 1])
    for t in range(5):
        weights = (key[: t + 1, 0] @ query[t, 0] * 0.5).exp()
        expected = weights @ value[: t + 1, 0] / (weights.sum() + sinks[0].exp())
        assert error_ratio(found[t, 0], expected) < 1e-14


@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, [(3, 600)]])
@pytest.mark.parametrize("window", [None, 40])
def test_cpu(lengths: list[tuple[int, int]], window: int | None) -> None:
    case = case_of(lengths, torch.float32, "cpu", window)
    check(CpuKernels(), "paged_attention", case, TOLERANCE[torch.float32])


@pytest.mark.parametrize("lengths", [DECODES, PREFILLS])
@pytest.mark.parametrize("window", [None, 40])
def test_triton(
    lengths: list[tuple[int, int]], window: int | None, dtype: torch.dtype, device: str
) -> None:
    case = case_of(lengths, dtype, device, window)
    check(CudaKernels(), "paged_attention", case, TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_shares_count_a_sink_once(splits: int, device: str) -> None:
    """However many shares there are, and however few of them a sequence uses."""
    case = case_of(DECODES, torch.float32, device)
    wide = {name: widen(value) for name, value in case.items()}
    paged_attention(AttentionProblem(**wide))
    decode_attention(AttentionProblem(**case), Shares(splits, SPLIT_KEYS, Tile(16, 32, 1, 1)))
    assert error_ratio(case["out"][:3], wide["out"][:3]) < TOLERANCE[torch.float32]


def test_cpu_refuses_others() -> None:
    case = case_of(DECODES, torch.float32, "cpu")
    with pytest.raises(RuntimeError, match="paged_attention: sinks must"):
        CpuKernels().paged_attention(AttentionProblem(**case | dict(sinks=torch.zeros(7))))
