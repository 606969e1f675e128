# SPDX-License-Identifier: Apache-2.0
"""Scans in segments: against the fp64 recurrence, and their own pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import Case, check, error_ratio, gdn_case, strided, widen
from tests.kernels.test_triton_gdn_stages import as_problem
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import (
    gdn_gates,
    l2_normalise,
    naive_chunk_gated_delta_rule,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnPrefill
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import (
    ScanCuts,
    ScanSegments,
    cut_segments,
)

pytestmark = pytest.mark.slow

kernels = CudaKernels()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def cut(case: Case, counts: list[int]) -> ScanSegments:
    """The sequences of a case (padding too) in so many segments."""
    starts = case["query_start_loc"]
    return cut_segments(starts.tolist(), counts, starts.device)


class Split:
    """The prefill op with its sequences cut, for `check`."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def gdn_prefill(self, p: GdnPrefill) -> None:
        kernels.gdn_prefill(replace(p, segments=cut(vars(p), self.counts)))


def check_split(case: Case, counts: list[int], tolerance: float) -> None:
    split: Kernels = Split(counts)  # type: ignore[assignment]
    check(split, "gdn_prefill", case, tolerance)


@pytest.mark.parametrize("length, count, slow", [(130, 2, True), (200, 3, True), (500, 8, False)])
def test_one_sequence(length, count, slow, dtype, device):
    case = gdn_case([length], [True], (1, 1, 16, 24), dtype, device, slow_decay=slow)
    check_split(case, [count], TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(1, 2, 16, 24), (1, 1, 40, 12), (1, 1, 96, 192)])
def test_some_sequences_of_a_ragged_batch(heads, device):
    case = gdn_case([1, 200, 0, 130, 64], [True, False, False, True, False], heads, torch.float32,
                    device, padding=2, slow_decay=True)  # fmt: skip
    check_split(case, [1, 3, 1, 2, 1, 1, 1], 1e-5)


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16])
def test_a_rounded_state_is_rounded_once(state_dtype, device):
    if state_dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter truncates bf16 stores")
    case = gdn_case([200], [True], (1, 1, 16, 16), torch.float32, device, state_dtype=state_dtype,
                    slow_decay=True)  # fmt: skip
    wide, out = case["ssm_state"].float(), torch.empty_like(case["out"])
    kernels.gdn_prefill(GdnPrefill(**case, segments=cut(case, [3])))
    kernels.gdn_prefill(GdnPrefill(**case | dict(out=out, ssm_state=wide), segments=cut(case, [3])))
    index = case["state_indices"].long()
    assert torch.equal(case["out"], out)
    assert torch.equal(case["ssm_state"][index], wide[index].to(state_dtype))


def plain(case: Case, kernels: CudaKernels = kernels) -> tuple[Tensor, Tensor]:
    """Output and state pool of the plain scan of a copy."""
    out, state = torch.empty_like(case["out"]), case["ssm_state"].clone()
    kernels.gdn_prefill(GdnPrefill(**case | dict(out=out, ssm_state=state)))
    return out, state


def test_one_segment_each_has_the_bits_of_the_plain_scan(device):
    case = gdn_case(
        [70, 0, 130], [True, True, False], (1, 1, 16, 24), torch.float16, device, padding=1
    )
    out, state = plain(case)
    kernels.gdn_prefill(GdnPrefill(**case, segments=cut(case, [1] * 4)))
    assert torch.equal(case["out"][:200], out[:200])
    index = case["state_indices"][:3].long()
    assert torch.equal(case["ssm_state"][index], state[index])


def test_the_first_two_segments_have_the_bits_of_the_plain_scan(device):
    """What the second starts from is no product of matrices, but the first's own end."""
    case = gdn_case([200], [True], (1, 1, 16, 24), torch.float16, device, slow_decay=True)
    out, _ = plain(case)
    kernels.gdn_prefill(GdnPrefill(**case, segments=cut(case, [3])))
    assert torch.equal(case["out"][:128], out[:128])


def test_neighbours_change_no_bit_of_a_sequence_cut_alike(device):
    case = gdn_case(
        [200, 140], [True, False], (1, 1, 16, 16), torch.float16, device, slow_decay=True
    )
    together, state = torch.empty_like(case["out"]), case["ssm_state"].clone()
    kernels.gdn_prefill(
        GdnPrefill(**case | dict(out=together, ssm_state=state), segments=cut(case, [3, 2]))
    )
    kernels.gdn_prefill(GdnPrefill(**case, segments=cut(case, [3, 1])))
    assert torch.equal(together[:200], case["out"][:200])
    index = case["state_indices"][:1].long()
    assert torch.equal(state[index], case["ssm_state"][index])


def test_padding_with_tokens_leaves_the_pool_alone(device):
    case = gdn_case([130, 70], [True, True], (1, 1, 16, 16), torch.float32, device)
    arena = case["ssm_state"]
    arena.copy_(torch.randn(arena.shape))
    case |= dict(ssm_state=arena[1:], state_indices=torch.tensor([-1, 2]).int().to(device))
    before = arena.clone()
    kernels.gdn_prefill(GdnPrefill(**case, segments=cut(case, [2, 1])))
    assert torch.equal(arena[:3], before[:3]) and not torch.equal(arena[3], before[3])


def test_what_is_forgotten_is_not_read(device):
    """With strong decay a segment's end does not depend on what came long before; the states
    between segments must say so even if that is infinite."""
    case = gdn_case([640], [True], (1, 1, 16, 16), torch.float32, device)
    case["A_log"].fill_(1.0)
    case["a"].fill_(1.0)
    wide = {name: widen(value) for name, value in case.items()}
    NaiveKernels().gdn_prefill(GdnPrefill(**wide))
    case["ssm_state"][case["state_indices"].long()] = float("inf")
    kernels.gdn_prefill(GdnPrefill(**case, segments=cut(case, [3])))
    assert case["out"][:64].isnan().any()
    assert error_ratio(case["out"][256:], wide["out"][256:]) < 1e-5


def test_decay_just_short_of_forgetting(device):
    """A state that decays by 2^-40 in a segment, but was 2^40, is still all there is to see."""
    case = gdn_case([192], [True], (1, 1, 16, 16), torch.float32, device)
    for name, value in (("A_log", 0.0), ("dt_bias", 0.0), ("b", -40.0)):
        case[name].fill_(value)
    case["a"].fill_(-0.6115)  # softplus: 0.4332 nats per token, 2^-40 per chunk
    case["ssm_state"][case["state_indices"].long()] *= 2.0**60
    check_split(case, [3], 1e-5)


def test_descriptors_change_no_bit(device):
    case = gdn_case([150], [True], (1, 1, 64, 128), torch.float16, device, slow_decay=True)
    misaligned = case | dict(
        qkv=strided(case["qkv"], 4),
        out=torch.empty_like(case["out"]),
        ssm_state=case["ssm_state"].clone(),
    )
    check_split(case, [3], 2e-3)
    kernels.gdn_prefill(GdnPrefill(**misaligned, segments=cut(case, [3])))
    index = case["state_indices"].long()
    assert torch.equal(case["out"], misaligned["out"])
    assert torch.equal(case["ssm_state"][index], misaligned["ssm_state"][index])


def test_the_reference_takes_no_segments():
    case = gdn_case([200], [True], (1, 1, 8, 8), torch.float32, "cpu")
    with pytest.raises(ValueError, match="give no segments"):
        NaiveKernels().gdn_prefill(GdnPrefill(**case, segments=cut(case, [2])))


def test_only_normalised_keys_are_scanned_in_segments():
    case = gdn_case([130], [True], (1, 1, 16, 16), torch.float32, "cpu")
    problem = replace(as_problem(case), l2norm=False)
    with pytest.raises(ValueError, match="normalised keys only"):
        run_chunked(problem, case["out"], segments=cut(case, [2]))


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """Output and final state of a one-sequence case, in fp64 on its device."""
    p = as_problem(case)
    q, k, v = (x.double() for x in (p.q, p.k, p.v))
    q, k = (l2_normalise(x).repeat_interleave(p.group, dim=1) for x in (q, k))
    assert p.A_log is not None and p.dt_bias is not None
    g, beta = gdn_gates(p.a.double(), p.b.double(), p.A_log.double(), p.dt_bias.double())
    state = p.ssm_state[p.state_indices[0].long()].mT.double()
    return naive_chunk_gated_delta_rule(q, k, v, g, beta, p.scale, state)


@pytest.fixture(params=["Triton", "vllm_cuda"])
def stages(request):
    """The kernels with either scan, where there are two."""
    if request.param == "Triton":
        return kernels
    return CudaKernels(torch.cuda.get_device_capability())


@pytest.mark.gpu
@pytest.mark.parametrize("slow_decay", [False, True])
@pytest.mark.parametrize("length", [3072, 8192, 9000])
def test_errors_are_those_of_the_plain_scan(length, slow_decay, stages):
    case = gdn_case([length], [True], (2, 8, 128, 128), torch.bfloat16, "cuda",
                    slow_decay=slow_decay)  # fmt: skip
    out, state = exact(case)
    whole, pool = plain(case, stages)
    segments = ScanCuts(8, 128, 132).of_batch([0, length], whole.device)
    assert segments is not None and len(segments) > 2
    stages.gdn_prefill(GdnPrefill(**case, segments=segments))
    index = int(case["state_indices"][0])
    pairs = ((case["out"], whole, out), (case["ssm_state"][index].mT, pool[index].mT, state))
    for split, one, ref in pairs:
        assert error_ratio(split, ref) < 1.2 * error_ratio(one, ref)
