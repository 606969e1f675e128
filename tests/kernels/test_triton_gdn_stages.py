# SPDX-License-Identifier: Apache-2.0
"""The stages of the chunked gated delta rule on their own, and the bits they promise."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.cases import Case, check, error_ratio, gdn_case, strided
from vllm.kernels.chunks import chunk_metadata
from vllm.kernels.cuda import CudaKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import describable
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import intra_chunk
from vllm.model_executor.layers.fla.ops.gated_delta_rule.inverse import invert_unit_lower
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import (
    gdn_gates,
    l2_normalise,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem, GdnPrefill

kernels = CudaKernels()


@triton.jit
def _invert(a_ptr, out_ptr, SPLIT: tl.constexpr) -> None:
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    tl.store(out_ptr + i * 64 + j, invert_unit_lower(tl.load(a_ptr + i * 64 + j), SPLIT))


# Split into bf16 halves a factor keeps 16 bits, split into tf32 halves all of its 24.
@pytest.mark.parametrize("split, tolerance", [(False, 1e-6), (True, 1e-4)])
@pytest.mark.parametrize("kind", ["random", "equal keys"])
def test_inverse(split, tolerance, kind, device):
    if split and device == "cpu":
        pytest.skip("the interpreter's bf16 dot is wrong")
    a = torch.rand(64, 64) * 0.6 - 0.3 if kind == "random" else torch.full((64, 64), 0.999)
    a = a.tril(-1).to(device)
    out = torch.full_like(a, float("nan"))
    _invert[(1,)](a, out, SPLIT=split)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + a.double().cpu())
    assert error_ratio(out.cpu(), exact) < tolerance
    assert torch.equal(out.triu(1), torch.zeros_like(out))
    assert torch.equal(out.diagonal(), torch.ones_like(out[0]))


def as_problem(case: Case) -> ChunkedProblem:
    return GdnPrefill(**case).chunked


def exact_factors(p: ChunkedProblem, rows: slice, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """`T, P` and the four rows of one chunk, in fp64 from their definitions."""
    q, k = (x[rows, head // p.group].double() for x in (p.q, p.k))
    norms = [torch.rsqrt(x.square().sum(-1) + 1e-6) for x in (k, q)]
    q, k = l2_normalise(q) * p.scale, l2_normalise(k)
    assert p.A_log is not None and p.dt_bias is not None
    g, beta = (x[:, head] for x in gdn_gates(
        p.a[rows].double(), p.b[rows].double(), p.A_log.double(), p.dt_bias.double()
    ))  # fmt: skip
    G = g.cumsum(0)
    decay = (G[:, None] - G[None, :]).exp()
    A = (beta[:, None] * (k @ k.T) * decay).tril(-1)
    T = torch.linalg.inv(torch.eye(len(k), dtype=torch.float64, device=k.device) + A) * beta
    factors = [norms[0] * G.exp(), norms[1] * p.scale * G.exp(), norms[0] * (G[-1] - G).exp()]
    return T, (q @ k.T * decay).tril(), torch.stack([*factors, G.exp()])


def test_factors_of_each_chunk(dtype, device):
    case = gdn_case([70, 64, 1], [False] * 3, (1, 2, 24, 16), dtype, device)
    p = as_problem(case)
    factors = intra_chunk(p)
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    for chunk, rows in enumerate([(0, 64), (64, 70), (70, 134), (134, 135)]):
        n = rows[1] - rows[0]
        for head in range(2):
            T, P, vectors = exact_factors(p, slice(*rows), head)
            assert error_ratio(factors.T[chunk, head, :n, :n], T) < tolerance
            assert error_ratio(factors.P[chunk, head, :n, :n], P) < tolerance
            assert error_ratio(factors.rows[chunk, head, :, :n], vectors) < 2e-6
            assert not factors.T[chunk, head, :, n:].any()
            assert not factors.P[chunk, head, n:].any() and not factors.P[chunk, head, :, n:].any()
            assert not factors.rows[chunk, head, :3, n:].any()
            # The chunk's decay is carried on; a scan adds in another order at every place.
            last = factors.rows[chunk, head, 3, n - 1]
            assert error_ratio(factors.rows[chunk, head, 3, n - 1 :], last.expand(65 - n)) < 1e-6


def rows_of(case: Case, start: int, end: int, carried: bool) -> Case:
    """The op's arguments for tokens `start` to `end` of a one-sequence case."""
    device = case["qkv"].device
    indices, offsets = chunk_metadata([0, end - start])
    return case | {name: case[name][start:end] for name in ("qkv", "a", "b", "out")} | dict(
        has_initial_state=torch.tensor([carried], device=device),
        query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=device),
        chunk_indices=indices.to(device),
        chunk_offsets=offsets.to(device),
    )  # fmt: skip


@pytest.mark.parametrize("split", [64, 128])
def test_continuing_at_a_chunk_gives_the_same_bits(split, dtype, device):
    case = gdn_case([150], [False], (1, 2, 16, 16), dtype, device)
    whole, state = torch.empty_like(case["out"]), case["ssm_state"].clone()
    kernels.gdn_prefill(GdnPrefill(**case | dict(out=whole, ssm_state=state)))
    kernels.gdn_prefill(GdnPrefill(**rows_of(case, 0, split, False)))
    kernels.gdn_prefill(GdnPrefill(**rows_of(case, split, 150, True)))
    index = case["state_indices"].long()
    assert torch.equal(case["out"], whole)
    assert torch.equal(case["ssm_state"][index], state[index])


def test_a_batch_gives_each_sequence_the_bits_it_has_alone(dtype, device):
    lengths = [70, 3, 64]
    case = gdn_case(lengths, [True, False, True], (2, 4, 16, 24), dtype, device)
    before = case["ssm_state"].clone()
    kernels.gdn_prefill(GdnPrefill(**case))
    start = 0
    for seq, length in enumerate(lengths):
        alone = rows_of(case, start, start + length, bool(case["has_initial_state"][seq]))
        index = case["state_indices"][seq : seq + 1]
        alone |= dict(out=torch.empty_like(alone["out"]), ssm_state=before, state_indices=index)
        kernels.gdn_prefill(GdnPrefill(**alone))
        assert torch.equal(alone["out"], case["out"][start : start + length])
        assert torch.equal(before[index.long()], case["ssm_state"][index.long()])
        start += length


@pytest.mark.parametrize("heads", [(1, 2, 64, 64), (1, 1, 128, 192)])
def test_descriptors_change_no_bit(heads, device):
    """Rows that descriptors cannot address (not multiples of 16 bytes) take the masked loads."""
    case = gdn_case([150, 64, 3], [True, False, True], heads, torch.float16, device, padding=1,
                    slow_decay=True)  # fmt: skip
    misaligned = case | dict(
        qkv=strided(case["qkv"], 4),
        out=torch.empty_like(case["out"]),
        ssm_state=case["ssm_state"].clone(),
    )
    assert all(describable(x) for x in (as_problem(case).q, as_problem(case).v, case["out"]))
    assert not describable(as_problem(misaligned).q)
    check(kernels, "gdn_prefill", case, 2e-3)
    kernels.gdn_prefill(GdnPrefill(**misaligned))
    index = case["state_indices"][:3].long()
    assert torch.equal(case["out"][:217], misaligned["out"][:217])
    assert torch.equal(case["ssm_state"][index], misaligned["ssm_state"][index])


@pytest.mark.parametrize("heads", [(1, 2, 16, 16), (1, 1, 64, 64)])
def test_nan_stays_in_its_sequence(heads, device):
    """Tiles reach past a sequence's end, into its neighbour and into rows of no sequence."""
    case = gdn_case([5, 70, 9], [True] * 3, heads, torch.float16, device, padding=3)
    clean, state = torch.empty_like(case["out"]), case["ssm_state"].clone()
    kernels.gdn_prefill(GdnPrefill(**case | dict(out=clean, ssm_state=state)))
    for name in ("qkv", "a", "b"):
        case[name][5:75] = float("nan")
        case[name][84:] = float("nan")
    kernels.gdn_prefill(GdnPrefill(**case))
    for rows, seq in ((slice(0, 5), 0), (slice(75, 84), 2)):
        index = case["state_indices"][seq].long()
        assert torch.equal(case["out"][rows], clean[rows])
        assert torch.equal(case["ssm_state"][index], state[index])
    assert case["out"][5:75].isnan().all()
