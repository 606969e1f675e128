# SPDX-License-Identifier: Apache-2.0
"""The chunk factors in CUDA C++ against fp64, against the Triton stage, and in graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import Case, error_ratio, gdn_case
from tests.kernels.test_triton_gdn_stages import as_problem, exact_factors
from vllm._extension import CUDA_LIBRARY
from vllm.kernels.cuda_library import HOPPER
from vllm.model_executor.layers.fla.ops.gated_delta_rule.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper import (
    OPS,
    chunk_factors,
    takes_factors,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors, intra_chunk
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import gdn_gates
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem, GdnPrefill

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: what three products of split factors may add to the rounding of T
SPLIT_ERROR = 1e-4


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"the kernel needs compute capability {HOPPER}")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    assert OPS.choose(HOPPER)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def case_of(lengths: list[int], heads: tuple[int, int], **options: bool) -> Case:
    carried = [False] * len(lengths)
    return gdn_case(lengths, carried, (*heads, 128, 128), BF16, "cuda", **options)


def chunks_of(lengths: list[int]) -> list[slice]:
    """Tokens of each chunk of the batch."""
    bounds = pairwise([0, *accumulate(lengths)])
    return [slice(t, min(t + 64, end)) for start, end in bounds for t in range(start, end, 64)]


def check_exact(p: ChunkedProblem, gated: ChunkedProblem, lengths: list[int]) -> None:
    """Factors of `p` against fp64; `gated` is the same with projections in place of gates."""
    assert takes_factors(p)
    factors = chunk_factors(p)
    for chunk, rows in enumerate(chunks_of(lengths)):
        n = rows.stop - rows.start
        for head in range(p.v.shape[1]):
            T, P, vectors = exact_factors(gated, rows, head)
            found = [x[chunk, head] for x in (factors.T, factors.P, factors.rows)]
            assert error_ratio(found[0][:n, :n], T) < error_ratio(T.to(BF16), T) + SPLIT_ERROR
            assert error_ratio(found[1][:n, :n], P) < 5e-3
            assert error_ratio(found[2][:, :n], vectors) < 2e-6
            # Sums of 64 log decays near -100 have an ulp of 8e-6.
            assert all(error_ratio(found[2][i, :n], vectors[i]) < 1e-5 for i in range(4))
            assert not found[0][n:].any() and not found[0][:, n:].any()
            assert not found[1][n:].any() and not found[1][:, n:].any()
            assert not found[2][:3, n:].any()
            last = found[2][3, n - 1]
            assert error_ratio(found[2][3, n - 1 :], last.expand(65 - n)) < 1e-6
            assert not found[0].triu(1).any() and not found[1].triu(1).any()


@pytest.mark.parametrize("slow_decay", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3), (2, 8)])
def test_factors_against_fp64(heads: tuple[int, int], slow_decay: bool) -> None:
    lengths = [70, 64, 1, 200, 15]
    p = as_problem(case_of(lengths, heads, slow_decay=slow_decay))
    check_exact(p, p, lengths)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_projections_and_gates_of_both_dtypes(dtype: torch.dtype) -> None:
    lengths = [100, 31]
    case = case_of(lengths, (1, 2))
    wide = case | dict(a=case["a"].to(dtype), b=case["b"].to(dtype))
    gated = as_problem(wide)
    check_exact(gated, gated, lengths)
    g, beta = gdn_gates(*(case[x].float() for x in ("a", "b", "A_log", "dt_bias")))
    check_exact(replace(gated, a=g, b=beta, A_log=None, dt_bias=None), gated, lengths)


@pytest.mark.parametrize("noise", [0.0, 1e-2, 0.3])
def test_nearly_dependent_keys(noise: float) -> None:
    """With equal keys, no decay and beta near one, A's elements are all close to one."""
    lengths = [64, 50]
    case = case_of(lengths, (1, 2), slow_decay=True)
    key = torch.randn(128, device="cuda")
    case["qkv"][:, 128:256] = key + noise * torch.randn(114, 128, device="cuda")
    case["b"].fill_(8.0)
    p = as_problem(case)
    check_exact(p, p, lengths)


def test_unnormalised_vectors() -> None:
    p = replace(as_problem(case_of([130], (1, 2))), l2norm=False)
    p = replace(p, q=p.q * 0.125, k=p.k * 0.05)
    assert_close(chunk_factors(p), intra_chunk(p))


def assert_close(found: ChunkFactors, expected: ChunkFactors) -> None:
    assert error_ratio(found.T, expected.T.double()) < 5e-3
    assert error_ratio(found.P, expected.P.double()) < 5e-3
    assert error_ratio(found.rows, expected.rows.double()) < 2e-6


def test_like_the_triton_stage_at_full_size() -> None:
    p = as_problem(case_of([4096, 1000, 3], (16, 32)))
    assert_close(chunk_factors(p), intra_chunk(p))


def test_a_chunk_has_the_bits_it_has_alone() -> None:
    lengths = [70, 3, 64]
    p = as_problem(case_of(lengths, (2, 4)))
    whole = chunk_factors(p)
    one = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    for chunk, rows in enumerate(chunks_of(lengths)):
        starts = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device="cuda")
        parts: dict[str, Tensor] = {
            name: getattr(p, name)[rows] for name in ("q", "k", "v", "a", "b")
        }
        alone = chunk_factors(replace(p, query_start_loc=starts, chunk_indices=one, **parts))
        assert torch.equal(alone.T[0], whole.T[chunk])
        assert torch.equal(alone.P[0], whole.P[chunk])
        assert torch.equal(alone.rows[0], whole.rows[chunk])


def test_neighbours_with_nan_change_no_bit() -> None:
    case = case_of([5, 70, 9], (1, 2))
    clean = chunk_factors(as_problem(case))
    for name in ("qkv", "a", "b"):
        case[name][5:75] = float("nan")
    beside = chunk_factors(as_problem(case))
    for chunk in (0, 3):
        for name in ("T", "P", "rows"):
            assert torch.equal(getattr(beside, name)[chunk], getattr(clean, name)[chunk])
    assert beside.T[1].isnan().any()


def test_in_a_graph() -> None:
    p = as_problem(case_of([300], (2, 4)))
    eager = chunk_factors(p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chunk_factors(p)
    for x in (captured.T, captured.P, captured.rows):
        x.fill_(float("nan"))
    graph.replay()
    for name in ("T", "P", "rows"):
        assert torch.equal(getattr(captured, name), getattr(eager, name))


def test_a_prefill_with_either_first_stage() -> None:
    """A prefill through both first stages differs by their rounding alone, and does differ."""
    case = case_of([150, 64], (2, 4), slow_decay=True)
    outs = []
    for make_factors in (intra_chunk, chunk_factors):
        outs.append(torch.empty_like(case["out"]))
        copy = GdnPrefill(**case | dict(ssm_state=case["ssm_state"].clone()))
        run_chunked(copy.chunked, outs[-1], make_factors=make_factors)
    assert not torch.equal(*outs)
    assert error_ratio(outs[1], outs[0].double()) < 5e-3


def test_refused_arguments() -> None:
    p = as_problem(case_of([10], (1, 2)))
    with pytest.raises(RuntimeError, match="vllm_cuda: k must be bfloat16"):
        chunk_factors(replace(p, k=p.k.float()))
    with pytest.raises(RuntimeError, match="vllm_cuda: query_start_loc must be dense int32"):
        chunk_factors(replace(p, query_start_loc=p.query_start_loc.long()))
    with pytest.raises(RuntimeError, match="given both or neither"):
        chunk_factors(replace(p, dt_bias=None))
