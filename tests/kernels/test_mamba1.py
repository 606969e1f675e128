# SPDX-License-Identifier: Apache-2.0
"""Grouped Mamba: kernels against the fp64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.cases import error_ratio, ragged, randn, strided, widen
from tests.kernels.test_mamba2 import kernels as kernels
from tests.kernels.test_mamba2 import pool
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.mamba.ops.mamba1.problem import (
    Mamba1Decode,
    Mamba1Gates,
    Mamba1Prefill,
)

#: heads, groups, N
SIZES = [(4, 2, 16), (3, 1, 12), (2, 2, 8)]


def gates(tokens: int, size: tuple[int, int, int], dtype: torch.dtype, device: str) -> Mamba1Gates:
    heads, groups, n = size
    made: dict[str, Any] = dict(dtype=dtype, device=device)
    return Mamba1Gates(
        strided(randn(tokens, groups * n, **made)),
        strided(randn(tokens, heads * n, **made)),
        strided(randn(tokens, heads * n, **made)),
        torch.empty(heads * n, n).uniform_(-3, 1).to(device),
        torch.empty(heads * n).uniform_(-2, 1).to(device),
        torch.empty(heads * n).uniform_(-1, 1).to(device),
    )


def prefill(
    lengths: list[int], carried: list[bool], size: tuple[int, int, int], device: str,
    dtype: torch.dtype = torch.float32, padding: int = 0,
) -> Mamba1Prefill:  # fmt: skip
    heads, _, n = size
    batch, count = ragged(lengths, carried, device, padding)
    tokens = sum(lengths) + padding
    indices = batch["state_indices"].tolist()
    blocks = [index for index, carry in zip(indices, carried, strict=False) if carry]
    return Mamba1Prefill(
        x=strided(randn(tokens, heads * n, dtype=dtype, device=device)),
        gates=gates(tokens, size, dtype, device),
        state=pool(blocks, count, heads, n, n, dtype=torch.float32, device=device),
        out=torch.full((tokens, heads * n), torch.nan, dtype=dtype, device=device),
        **batch,
    )


def wide(problem: Any) -> Any:
    fields = {name: widen(value) for name, value in vars(problem).items()}
    fields["gates"] = Mamba1Gates(**{name: widen(v) for name, v in vars(problem.gates).items()})
    return type(problem)(**fields)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("lengths", "carried"), [([5, 1, 9], [False, True, True]), ([3, 0], [True, False])]
)
def test_prefills_agree_with_fp64(kernels, size, lengths, carried, device):
    problem = prefill(lengths, carried, size, device, padding=1)
    exact = wide(problem)
    kernels.mamba1_prefill(problem)
    NaiveKernels().mamba1_prefill(exact)
    used = sum(lengths)
    assert error_ratio(problem.out[:used], exact.out[:used]) < 5e-6
    assert error_ratio(problem.state, exact.state) < 5e-6
    assert torch.equal(problem.state.isnan(), exact.state.isnan())


@pytest.mark.parametrize("repeats_first", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_decodes_agree_with_fp64(kernels, size, repeats_first, device):
    """Several steps; a row without a state is padding, and more rows than states are no matter."""
    heads, groups, n = size
    made: dict[str, Any] = dict(dtype=torch.float32, device=device)
    channels = (heads if repeats_first else groups) * n
    problem = Mamba1Decode(
        x=strided(randn(7, channels, **made)),
        gates=gates(7, size, **made),
        conv_weight=randn(channels, 4, **made),
        conv_bias=randn(channels, **made),
        conv_state=pool([0, 2], 4, 3, channels, **made),
        state=pool([0, 2], 4, heads, n, n, **made),
        state_indices=torch.tensor([2, -1, 0, -1, -1, -1, -1], dtype=torch.int32, device=device),
        out=torch.full((7, heads * n), torch.nan, **made),
    )
    exact = wide(problem)
    for _ in range(3):
        kernels.mamba1_decode(problem)
        NaiveKernels().mamba1_decode(exact)
        assert error_ratio(problem.out[[0, 2]], exact.out[[0, 2]]) < 5e-6
    for name in ("conv_state", "state"):
        ours, theirs = getattr(problem, name), getattr(exact, name)
        assert error_ratio(ours, theirs) < 5e-6
        assert torch.equal(ours.isnan(), theirs.isnan())


def test_a_prefill_in_two_parts_is_one(kernels, device):
    whole = prefill([20], [True], SIZES[0], device)
    parts = replace(whole, state=whole.state.clone(), out=whole.out.clone())
    kernels.mamba1_prefill(whole)
    for part in (slice(0, 7), slice(7, 20)):
        count = part.stop - part.start
        cut = {name: getattr(whole.gates, name)[part] for name in ("B", "C", "dt")}
        starts = torch.tensor([0, count], dtype=torch.int32, device=device)
        given = dict(x=parts.x[part], out=parts.out[part], query_start_loc=starts)
        kernels.mamba1_prefill(replace(parts, gates=replace(parts.gates, **cut), **given))
    torch.testing.assert_close(parts.out, whole.out, rtol=1e-6, atol=1e-6)
    assert error_ratio(parts.state, whole.state.double()) < 1e-6


@pytest.mark.gpu
def test_compiled_at_the_models_size():
    problem = prefill([70, 3], [False, True], (256, 64, 16), "cuda", torch.bfloat16)
    exact = wide(problem)
    CudaKernels().mamba1_prefill(problem)
    NaiveKernels().mamba1_prefill(exact)
    assert error_ratio(problem.out, exact.out) < 5e-3
