# SPDX-License-Identifier: Apache-2.0
"""Which sums travel through peer memory, and how; the kernels' own tests need a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from vllm.distributed.device_communicators.peer_sums import LARGEST
from vllm.kernels.all_reduce import cuda
from vllm.kernels.all_reduce.naive import sum_ranks, sum_ranks_add_norm
from vllm.kernels.norm.naive import rms_norm
from vllm.kernels.residual_stream import Norm

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"


def constants(name: str) -> list[int]:
    """Of `csrc/cuda/peers.h`."""
    found = re.search(rf"{name}(?:\[\])? = \{{?([\d, ]+)\}}?;", (SOURCES / "peers.h").read_text())
    assert found is not None, name
    return [int(number) for number in found[1].split(",")]


def test_limits_are_those_of_the_kernels() -> None:
    assert constants("kMaxRanks") == [cuda.MAX_RANKS]
    assert constants("kSumNormColumns") == list(cuda.NORM_COLUMNS)
    assert constants("kPeerHandleBytes") == [cuda._HANDLE_BYTES]
    assert LARGEST % cuda.ALIGNMENT == 0


def test_two_ranks_need_one_shot_and_more_need_two_for_large_messages() -> None:
    sizes = (16, 8 * 1024, 64 * 1024, 256 * 1024, LARGEST)
    chosen = {n: [cuda.uses_two_shots(size, n) for size in sizes] for n in range(2, 9)}
    assert not any(chosen[2])
    for ranks in range(2, 8):  # with the ranks and with the size
        assert chosen[ranks] == sorted(chosen[ranks])
        assert all(a <= b for a, b in zip(chosen[ranks], chosen[ranks + 1], strict=True))
    assert chosen[4] == [False, False, False, True, True]
    assert chosen[8] == [False, False, True, True, True]


def test_the_reference_adds_in_fp32_and_rounds_once() -> None:
    parts = [torch.full((1, 8), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert sum_ranks(parts).unique().tolist() == [258.0]
    assert (parts[0] + parts[1] + parts[2]).unique().tolist() == [256.0]
    wide = [torch.tensor([[value]], dtype=torch.float32) for value in (1e8, 1.0, -1e8)]
    assert sum_ranks(wide).item() == 0.0 and sum_ranks([wide[0], wide[2], wide[1]]).item() == 1.0


@pytest.mark.parametrize("one_plus", [False, True])
def test_the_reference_with_a_norm_rounds_between(one_plus: bool) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(3, 32).to(torch.bfloat16) for _ in range(3)]
    residual, weight = torch.randn(3, 32).to(torch.bfloat16), torch.randn(32).to(torch.bfloat16)
    normed, total = sum_ranks_add_norm(parts, residual, Norm(weight, 1e-5, one_plus))
    assert torch.equal(total, sum_ranks(parts) + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5, one_plus=one_plus))
