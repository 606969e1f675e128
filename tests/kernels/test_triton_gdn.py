# SPDX-License-Identifier: Apache-2.0
"""Triton gated delta rule against the fp64 recurrence: prefill, decode, published functions."""

import pytest
import torch

from tests.kernels.cases import (
    Case,
    check,
    error_ratio,
    gdn_case,
    gdn_decode_case,
    over_dtypes,
)
from tests.nightly import covering
from vllm.kernels.chunks import chunk_metadata
from vllm.kernels.cuda import CudaKernels
from vllm.model_executor.layers.fla.ops import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import (
    l2_normalise,
    naive_recurrent_gated_delta_rule,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill

pytestmark = pytest.mark.slow

kernels = CudaKernels()
# Above `TOLERANCE`: four chained products with operands in the activation dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("heads", [(2, 4, 16, 24), (1, 1, 12, 40)])
def test_prefill_ragged(heads, dtype, device):
    case = gdn_case([1, 65, 0, 64, 20], [True, False, True, True, False], heads, dtype, device,
                    padding=2)  # fmt: skip
    check(kernels, "gdn_prefill", case, TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(1, 2, 96, 192), (1, 1, 256, 16), (1, 3, 128, 128)])
def test_prefill_wide_heads(heads, device):
    case = gdn_case([70], [True], heads, torch.float16, device)
    check(kernels, "gdn_prefill", case, TOLERANCE[torch.float16])


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16])
def test_prefill_with_a_rounded_state(state_dtype, device):
    if state_dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter truncates bf16 stores")
    case = gdn_case([66], [True], (1, 2, 16, 16), torch.float32, device, state_dtype=state_dtype)
    state = case.pop("ssm_state")
    exact = state.double()
    wide, out = state.float(), torch.empty_like(case["out"])
    kernels.gdn_prefill(GdnPrefill(**case, ssm_state=state))
    kernels.gdn_prefill(GdnPrefill(**case | dict(out=out), ssm_state=wide))
    index = case["state_indices"].long()
    assert torch.equal(case["out"], out)
    assert torch.equal(state[index], wide[index].to(state_dtype))
    assert error_ratio(state[index], exact[index]) > 0.1


@pytest.mark.parametrize("split", [1, 15, 16, 63, 64, 65])
def test_prefill_in_two_parts_equals_one(split, device):
    case = gdn_case([100], [False], (1, 2, 16, 16), torch.float32, device)
    whole = torch.empty_like(case["out"])
    state = case["ssm_state"].clone()
    kernels.gdn_prefill(GdnPrefill(**case | dict(out=whole, ssm_state=state)))
    for part, carried in ((slice(0, split), False), (slice(split, 100), True)):
        kernels.gdn_prefill(GdnPrefill(**case | _part(case, part, carried)))
    assert error_ratio(case["out"], whole.double()) < 5e-6
    index = case["state_indices"].long()
    assert error_ratio(case["ssm_state"][index], state[index].double()) < 5e-6


def _part(case: Case, part: slice, carried: bool) -> Case:
    device = case["qkv"].device
    indices, offsets = chunk_metadata([0, part.stop - part.start])
    return {name: case[name][part] for name in ("qkv", "a", "b", "out")} | dict(
        has_initial_state=torch.tensor([carried], device=device),
        query_start_loc=torch.tensor([0, part.stop - part.start], dtype=torch.int32, device=device),
        chunk_indices=indices.to(device),
        chunk_offsets=offsets.to(device),
    )


def test_prefill_of_repeated_keys(device):
    """Equal keys make `I + A` as ill-conditioned as it gets; the inverse must stay exact."""
    case = gdn_case([64], [False], (1, 1, 16, 16), torch.float32, device, slow_decay=True)
    case["qkv"][:, 16:32] = case["qkv"][:1, 16:32].clone()
    case["b"].fill_(6.0)
    check(kernels, "gdn_prefill", case, TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("heads", "bias", "dtype"),
    over_dtypes([(2, 4, 16, 24), (1, 1, 12, 40), (1, 2, 96, 192)], [False, True]),
    indirect=["dtype"],
)
def test_decode(heads, bias, dtype, device):
    case = gdn_decode_case(3, heads, dtype, device, bias=bias, padding=2)
    check(kernels, "gdn_decode", case, TOLERANCE[dtype])


def test_decode_with_a_rounded_state(device):
    case = gdn_decode_case(2, (1, 2, 16, 16), torch.float32, device, state_dtype=torch.float16)
    check(kernels, "gdn_decode", case, 5e-4)
    assert error_ratio(case["out"], case["out"].double()) == 0


def test_decode_continues_prefill(device):
    """The state a prefill leaves, stepped once, equals the prefill of one more token."""
    heads = (1, 2, 16, 24)
    case = gdn_case([67], [False], heads, torch.float32, device)
    raw = case["qkv"].clone()
    case["qkv"] = torch.nn.functional.silu(raw)
    whole = torch.empty_like(case["out"])
    kernels.gdn_prefill(GdnPrefill(**case | dict(out=whole, ssm_state=case["ssm_state"].clone())))
    kernels.gdn_prefill(GdnPrefill(**case | _part(case, slice(0, 66), False)))
    newest_only = torch.zeros(raw.shape[1], 4, device=device)
    newest_only[:, 3] = 1.0
    step = gdn_decode_case(1, heads, torch.float32, device)
    step |= {name: case[name] for name in ("A_log", "dt_bias", "ssm_state", "state_indices")}
    step |= dict(qkv=raw[66:], a=case["a"][66:], b=case["b"][66:], conv_weight=newest_only)
    step["conv_state"] = torch.zeros(len(case["ssm_state"]), 3, raw.shape[1], device=device)
    kernels.gdn_decode(GdnDecode(**step))
    assert error_ratio(step["out"], whole[66:].double()) < 1e-5


@pytest.mark.parametrize(
    ("function", "lengths", "l2norm"),
    covering(
        [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule],
        [None, [3, 0, 67, 10]],
        [False, True],
    ),
)
def test_published_functions(function, lengths, l2norm, device):
    batch, tokens = (2, 35) if lengths is None else (1, 80)
    q, k = l2_normalise(torch.randn(2, batch, tokens, 2, 16, device=device))
    if l2norm:
        q, k = q * 3, k * 0.5
    v = torch.randn(batch, tokens, 4, 24, device=device)
    g = -torch.rand(batch, tokens, 4, device=device)
    beta = torch.rand(batch, tokens, 4, device=device)
    lengths = lengths or [tokens] * batch
    starts = torch.tensor([0, *lengths], device=device).cumsum(0)
    state = torch.randn(len(lengths), 4, 16, 24, device=device)
    before = state.clone()
    out, final = function(
        q, k, v, g, beta, scale=0.3, initial_state=state, output_final_state=True,
        cu_seqlens=starts if batch == 1 else None, use_qk_l2norm_in_kernel=l2norm,
    )  # fmt: skip
    assert torch.equal(state, before)
    rows = [x.flatten(0, 1).double() for x in (q, k, v, g, beta)]
    if l2norm:
        rows[:2] = [l2_normalise(x) for x in rows[:2]]
    rows[:2] = [x.repeat_interleave(2, dim=1) for x in rows[:2]]
    for seq, length in enumerate(lengths):
        part = slice(int(starts[seq]), int(starts[seq]) + length)
        ref, last = naive_recurrent_gated_delta_rule(
            *(x[part] for x in rows), 0.3, state[seq].double()
        )
        assert error_ratio(final[seq], last) < 1e-5
        if length:
            assert error_ratio(out.flatten(0, 1)[part], ref) < 1e-5


def test_published_functions_refuse_wrong_shapes():
    x, gates = torch.randn(2, 5, 1, 16), torch.rand(2, 5, 1)
    with pytest.raises(ValueError, match="batch of one"):
        chunk_gated_delta_rule(x, x, x, gates, gates, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="initial_state"):
        fused_recurrent_gated_delta_rule(
            x, x, x, gates, gates, initial_state=torch.zeros(1, 1, 16, 16)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("slow_decay", [False, True])
def test_realistic_prefill(slow_decay, device):
    """Qwen3.5-4B heads; decays near 0.999 over 2,500 tokens catch gates held in 16 bits."""
    case = gdn_case([2500, 64, 1, 700], [True, False, True, False], (16, 32, 128, 128),
                    torch.bfloat16, device, padding=1, slow_decay=slow_decay)  # fmt: skip
    check(kernels, "gdn_prefill", case, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_slow_decay_in_fp32(device):
    case = gdn_case([2500], [True], (1, 2, 128, 128), torch.float32, device, slow_decay=True)
    check(kernels, "gdn_prefill", case, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_realistic_decode(device):
    case = gdn_decode_case(70, (16, 32, 128, 128), torch.bfloat16, device, padding=5)
    check(kernels, "gdn_decode", case, 5e-3)
