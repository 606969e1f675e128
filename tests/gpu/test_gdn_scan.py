# SPDX-License-Identifier: Apache-2.0
"""The CUDA C++ scan of the gated delta rule: accuracy beside Triton's, and the bits it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCE, Case, error_ratio, gdn_case, strided, widen
from tests.kernels.test_triton_gdn_stages import as_problem, rows_of
from vllm._extension import CUDA_LIBRARY
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule import hopper
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper import takes_scan
from vllm.model_executor.layers.fla.ops.gated_delta_rule.inter import inter_chunk
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors, intra_chunk
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem, GdnPrefill
from vllm.model_executor.layers.fla.ops.gated_delta_rule.segments import Scan

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
RAGGED = [200, 64, 1, 130, 63, 256]
CARRIED = [True, False, True, False, True, True]


@pytest.fixture(scope="module")
def scan() -> Scan:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    assert hopper.OPS.choose((9, 0))
    return hopper.scan


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def case_of(
    lengths: list[int], carried: list[bool], heads: tuple[int, int] = (2, 4), **options: object
) -> Case:
    return gdn_case(lengths, carried, (*heads, 128, 128), BF16, "cuda", **options)  # type: ignore[arg-type]


def run(scan: Scan, p: ChunkedProblem, factors: ChunkFactors) -> tuple[Tensor, Tensor]:
    """`(out, states)` of copies."""
    out = torch.full_like(p.v, float("nan"), memory_format=torch.contiguous_format)
    pool = torch.empty_strided(p.ssm_state.shape, p.ssm_state.stride(), dtype=p.ssm_state.dtype,
                               device="cuda").copy_(p.ssm_state)  # fmt: skip
    scan(replace(p, ssm_state=pool), factors, out)
    return out, pool


def written(p: ChunkedProblem) -> tuple[int, list[int]]:
    """The tokens and the state blocks that belong to sequences."""
    return int(p.query_start_loc[-1]), [i for i in p.state_indices.tolist() if i >= 0]


def errors(p: ChunkedProblem, result: tuple[Tensor, Tensor], exact: Case) -> tuple[float, float]:
    tokens, blocks = written(p)
    out, states = result
    return (
        error_ratio(out[:tokens], exact["out"][:tokens]),
        error_ratio(states[blocks], exact["ssm_state"][blocks]),
    )


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 4)])
@pytest.mark.parametrize("slow_decay", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_as_accurate_as_triton(
    scan: Scan, heads: tuple[int, int], slow_decay: bool, state_dtype: torch.dtype
) -> None:
    case = case_of(
        RAGGED, CARRIED, heads, padding=2, slow_decay=slow_decay, state_dtype=state_dtype
    )
    exact = {name: widen(value) for name, value in case.items()}
    NaiveKernels().gdn_prefill(GdnPrefill(**exact))
    p = as_problem(case)
    assert takes_scan(p, case["out"])
    factors = intra_chunk(p)
    ours, theirs = (run(op, p, factors) for op in (scan, inter_chunk))
    for mine, triton in zip(errors(p, ours, exact), errors(p, theirs, exact), strict=True):
        # Both round at the same places; the sums run in other orders.
        assert mine < TOLERANCE[BF16] and mine < 1.02 * triton
    tokens, blocks = written(p)
    assert ours[0][tokens:].isnan().all()
    others = [i for i in range(len(p.ssm_state)) if i not in blocks]
    assert torch.equal(ours[1][others].isnan(), p.ssm_state[others].isnan())


def test_a_long_sequence(scan: Scan) -> None:
    """More chunks than the ring has places, many times round."""
    p = as_problem(case_of([64 * 40 + 17], [True], slow_decay=True))
    factors = intra_chunk(p)
    (out, states), (expected, expected_states) = (run(op, p, factors) for op in (scan, inter_chunk))
    _, blocks = written(p)
    assert error_ratio(out, expected.double()) < 2e-3
    assert error_ratio(states[blocks], expected_states[blocks].double()) < 2e-3


@pytest.mark.parametrize("split", [64, 192])
@pytest.mark.parametrize("length", [256, 300])
def test_continuing_at_a_chunk_gives_the_same_bits(scan: Scan, split: int, length: int) -> None:
    case = case_of([length], [True])
    p = as_problem(case)
    whole, states = run(scan, p, intra_chunk(p))
    for start, end in ((0, split), (split, length)):
        part = as_problem(rows_of(case, start, end, True))
        scan(part, intra_chunk(part), case["out"][start:end])
    _, blocks = written(p)
    assert torch.equal(case["out"], whole)
    assert torch.equal(case["ssm_state"][blocks], states[blocks])


#: more (sequence, value head, tile) than any GPU has multiprocessors; some sequences are empty
MANY = [37 * i % 250 if i % 5 else 0 for i in range(70)]


@pytest.mark.parametrize("lengths", [RAGGED, MANY], ids=["few", "many"])
def test_a_batch_gives_each_sequence_the_bits_it_has_alone(scan: Scan, lengths: list[int]) -> None:
    carried = [i % 3 != 1 for i in range(len(lengths))]
    case = case_of(lengths, carried)
    p = as_problem(case)
    out, states = run(scan, p, intra_chunk(p))
    start = 0
    for seq, length in enumerate(lengths):
        block = int(p.state_indices[seq])
        if length == 0:
            assert torch.equal(states[block].isnan(), p.ssm_state[block].isnan())
            continue
        alone = rows_of(case, start, start + length, carried[seq])
        part = as_problem(alone | dict(state_indices=case["state_indices"][seq : seq + 1]))
        mine, pool = run(scan, part, intra_chunk(part))
        assert torch.equal(mine, out[start : start + length])
        assert torch.equal(pool[block], states[block])
        start += length


def test_nan_stays_in_its_sequence(scan: Scan) -> None:
    """Tiles reach past a sequence's end, into its neighbour and into rows of no sequence."""
    case = case_of([5, 70, 137], [True] * 3, padding=3)
    p = as_problem(case)
    clean, states = run(scan, p, intra_chunk(p))
    for name in ("qkv", "a", "b"):
        case[name][5:75] = float("nan")
        case[name][212:] = float("nan")
    out, pool = run(scan, p, intra_chunk(p))
    for rows, seq in ((slice(0, 5), 0), (slice(75, 212), 2)):
        block = int(p.state_indices[seq])
        assert torch.equal(out[rows], clean[rows]) and torch.equal(pool[block], states[block])
    assert out[5:75].isnan().all()


def test_replays_from_a_graph(scan: Scan) -> None:
    case = case_of([200, 130], [True, True])
    p = as_problem(case)
    factors = intra_chunk(p)
    expected, states = run(scan, p, factors)
    before, out = case["ssm_state"].clone(), case["out"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scan(p, factors, out)
    for _ in range(2):
        case["ssm_state"].copy_(before)
        out.fill_(float("nan"))
        graph.replay()
        _, blocks = written(p)
        assert torch.equal(out, expected)
        assert torch.equal(case["ssm_state"][blocks], states[blocks])


def test_prefill_takes_it(scan: Scan) -> None:
    """The op of the interface runs this scan, and Triton's where rows are misaligned."""
    case = case_of(RAGGED, CARRIED)
    kernels = CudaKernels((9, 0))
    calls: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kernels.gdn_prefill(GdnPrefill(**case))
        kernels.gdn_prefill(GdnPrefill(**case | dict(qkv=strided(case["qkv"], 4))))
        torch.cuda.synchronize()
    calls = [event.key for event in profile.key_averages() for _ in range(event.count)]
    assert sum("chunk_scan_kernel" in name for name in calls) == 1
    assert sum("_inter_chunk_kernel" in name for name in calls) == 1


def test_rejects_what_it_cannot_address(scan: Scan) -> None:
    case = case_of([64], [False])
    p = as_problem(case)
    factors = intra_chunk(p)
    misaligned = as_problem(case | dict(qkv=strided(case["qkv"], 4)))
    with pytest.raises(RuntimeError, match="must be bfloat16 .* 16-byte aligned rows"):
        scan(misaligned, factors, case["out"])
    with pytest.raises(RuntimeError, match="out must"):
        scan(p, factors, case["out"].float())
    with pytest.raises(RuntimeError, match="T must be the dense factors"):
        scan(p, replace(factors, T=factors.T[:, :, ::2]), case["out"])
    with pytest.raises(RuntimeError, match="states must be float32 or bfloat16"):
        scan(replace(p, ssm_state=p.ssm_state.half()), factors, case["out"])
    with pytest.raises(RuntimeError, match="query_start_loc must list"):
        scan(replace(p, query_start_loc=p.query_start_loc.long()), factors, case["out"])
