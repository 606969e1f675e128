# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: the definition against transformers, platforms against fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)

from tests.kernels.cases import TOLERANCE, error_ratio, randn, widen
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.hyper_connection import CollapseProblem, Connection, ConnectionProblem
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels

HIDDEN, STREAMS, TOKENS = 24, 4, 9
CONFIG = DeepseekV4Config(hidden_size=HIDDEN, hc_mult=STREAMS, num_hidden_layers=1)
F32 = torch.float32


@pytest.fixture(params=["cpu", "cuda"])
def kernels(request: pytest.FixtureRequest, device: str) -> Kernels:
    if request.param == "cpu" and device != "cpu":
        pytest.skip("the CPU's kernels read host memory")
    made: dict[str, Any] = {"cpu": CpuKernels, "cuda": CudaKernels}
    return made[request.param]()


def connection(
    tokens: int = TOKENS, dtype: torch.dtype = F32, device: str = "cpu", scale: float = 0.3
) -> ConnectionProblem:
    outputs = (2 + STREAMS) * STREAMS
    return ConnectionProblem(
        randn(tokens, STREAMS, HIDDEN, dtype=dtype, device=device),
        randn(outputs, STREAMS * HIDDEN, dtype=F32, device=device, scale=scale),
        randn(outputs, dtype=F32, device=device),
        torch.rand(3, device=device) + 0.5,
        norm_eps=1e-6,
        eps=1e-6,
        iterations=20,
    )


def collapse_of(problem: ConnectionProblem) -> CollapseProblem:
    rows = slice(0, STREAMS)
    return CollapseProblem(
        problem.streams,
        problem.weight[rows],
        problem.base[rows],
        problem.scale[:1],
        problem.norm_eps,
        problem.eps,
    )


def wide(problem: Any) -> Any:
    return type(problem)(**{name: widen(value) for name, value in vars(problem).items()})


def test_the_definition_is_transformers() -> None:
    """Weights of a connection, its use in a layer, and the streams after the last one."""
    problem, branch = connection(), torch.randn(TOKENS, HIDDEN)
    module = DeepseekV4HyperConnection(CONFIG)
    module.fn.data, module.base.data, module.scale.data = (
        problem.weight,
        problem.base,
        problem.scale,
    )
    post, mix, hidden = module(problem.streams[None])
    found = NaiveKernels().connect_streams(problem)
    for ours, theirs in ((found.post, post), (found.mix, mix), (found.hidden, hidden)):
        torch.testing.assert_close(ours, theirs[0], rtol=1e-5, atol=1e-6)
    joined = NaiveKernels().join_streams(problem.streams, branch, found)
    expected = post[0, :, :, None] * branch[:, None] + mix[0].mT @ problem.streams
    torch.testing.assert_close(joined, expected, rtol=1e-5, atol=1e-6)
    head, collapse = DeepseekV4HyperHead(CONFIG), collapse_of(problem)
    head.hc_fn.data, head.hc_base.data, head.hc_scale.data = (
        collapse.weight,
        collapse.base,
        collapse.scale,
    )
    found_hidden = NaiveKernels().collapse_streams(collapse)
    expected = head(problem.streams[None])[0]
    torch.testing.assert_close(found_hidden, expected, rtol=1e-5, atol=1e-6)


def test_the_mixing_matrix_keeps_what_there_is() -> None:
    """Columns add up to 1, up to the epsilons; rows come the closer to it, the more iterations."""
    errors = []
    for iterations in (1, 3, 20):
        problem = replace(wide(connection(scale=0.1)), iterations=iterations)
        mix = NaiveKernels().connect_streams(problem).mix
        assert float((mix.sum(1) - 1).abs().max()) < 1e-3
        errors.append(float((mix.sum(2) - 1).abs().max()))
    assert errors[0] > 0.3 and errors[2] < 0.5 * errors[1] < 0.25 * errors[0]


@pytest.mark.parametrize("dtype", [F32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_platforms(kernels: Kernels, tokens: int, dtype: torch.dtype, device: str) -> None:
    problem = connection(tokens, dtype, device)
    branch = randn(tokens, HIDDEN, dtype=dtype, device=device)
    reference = NaiveKernels()
    found, expected = kernels.connect_streams(problem), reference.connect_streams(wide(problem))
    joined = kernels.join_streams(problem.streams, branch, found)
    collapsed = kernels.collapse_streams(collapse_of(problem))
    assert found.hidden.dtype == joined.dtype == collapsed.dtype == dtype
    assert found.post.dtype == found.mix.dtype == F32
    assert joined.shape == (tokens, STREAMS, HIDDEN) and joined.is_contiguous()
    assert collapsed.shape == (tokens, HIDDEN)
    if not tokens:
        return
    streams = widen(problem.streams)
    pairs: list[tuple[Tensor, Tensor, torch.dtype]] = [
        (found.post, expected.post, F32),
        (found.mix, expected.mix, F32),
        (found.hidden, expected.hidden, dtype),
        (joined, reference.join_streams(streams, widen(branch), expected), dtype),
        (collapsed, reference.collapse_streams(wide(collapse_of(problem))), dtype),
    ]
    for ours, theirs, rounding in pairs:
        assert error_ratio(ours, theirs) < TOLERANCE[rounding]


def test_bits_of_a_token_do_not_depend_on_the_others() -> None:
    kernels, problem = CpuKernels(), connection(70)
    branch = torch.randn(70, HIDDEN)

    def outputs(rows: slice) -> list[Tensor]:
        part = replace(problem, streams=problem.streams[rows])
        found: Connection = kernels.connect_streams(part)
        joined = kernels.join_streams(part.streams, branch[rows], found)
        collapsed = kernels.collapse_streams(collapse_of(part))
        return [found.hidden, found.post, found.mix, joined, collapsed]

    whole = outputs(slice(None))
    for rows in (slice(0, 1), slice(13, 20), slice(69, 70)):
        for part, all_rows in zip(outputs(rows), whole, strict=True):
            assert torch.equal(part, all_rows[rows])


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("streams", lambda x: x.mT, "streams must be dense"),
        ("weight", lambda x: x.double(), "weight must be float32, bfloat16 or float16"),
        ("weight", lambda x: x.half(), "weight must be float32"),
        ("weight", lambda x: x[:-1], r"weight must have shape \[24, 96\]"),
        ("base", lambda x: x[1:], r"base must have shape \[24\]"),
        ("scale", lambda x: x[:1], r"scale must have shape \[3\]"),
    ],
)
def test_wrong_arguments_are_named(name: str, wrong: Any, message: str) -> None:
    problem = connection()
    problem = replace(problem, **{name: wrong(getattr(problem, name))})
    with pytest.raises(RuntimeError, match=message):
        CpuKernels().connect_streams(problem)
