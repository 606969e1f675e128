# SPDX-License-Identifier: Apache-2.0
"""The reference gated delta rule: chunked against recurrent, decode against prefill, against HF."""

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tests.kernels.cases import conv_case, error_ratio, gdn_case, gdn_decode_case
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import (
    l2_normalise,
    naive_chunk_gated_delta_rule,
    naive_recurrent_gated_delta_rule,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill

kernels = NaiveKernels()
F64 = torch.float64


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [1.0, 1e-3])
def test_chunked_equals_recurrent(tokens, decay):
    q, k = l2_normalise(torch.randn(2, tokens, 3, 12, dtype=F64))
    v = torch.randn(tokens, 3, 20, dtype=F64)
    g = -decay * torch.rand(tokens, 3, dtype=F64)
    beta = torch.rand(tokens, 3, dtype=F64)
    state = torch.randn(3, 12, 20, dtype=F64)
    o, final = naive_recurrent_gated_delta_rule(q, k, v, g, beta, 0.3, state)
    o_chunk, final_chunk = naive_chunk_gated_delta_rule(q, k, v, g, beta, 0.3, state)
    assert error_ratio(final_chunk, final) < 1e-12
    if tokens:
        assert error_ratio(o_chunk, o) < 1e-12


@pytest.mark.parametrize("split", [1, 2, 3, 5, 64])
def test_convolution_in_two_parts_equals_one(split):
    case = conv_case([70, 4], [False, True], 10, F64, "cpu", bias=True, padding=1)
    whole, state = case["out"].clone(), case["conv_state"].clone()
    kernels.causal_conv1d(**case | dict(out=whole, conv_state=state))
    for part, carried in ((slice(0, split), False), (slice(split, 70), True)):
        kernels.causal_conv1d(
            **case
            | dict(
                x=case["x"][part],
                out=case["out"][part],
                state_indices=case["state_indices"][:1],
                has_initial_state=torch.tensor([carried]),
                query_start_loc=torch.tensor([0, part.stop - part.start]),
            )
        )
    assert error_ratio(case["out"][:70], whole[:70]) < 1e-14
    index = case["state_indices"][0]
    assert torch.equal(case["conv_state"][index], state[index])
    assert torch.equal(state[index], case["x"][67:70])


@pytest.mark.parametrize("heads", [(2, 4, 16, 24), (1, 1, 8, 8)])
def test_decode_continues_prefill(heads):
    """conv + prefill of n + 1 tokens == conv + prefill of n, then one fused decode step."""
    _, nv, _, dv = heads
    case = gdn_decode_case(1, heads, F64, "cpu", state_dtype=F64, bias=True)
    rows = torch.randn(9, case["qkv"].shape[1], dtype=F64)
    gates = torch.randn(2, 9, nv, dtype=F64)
    index = case["state_indices"]

    def prefill(count: int) -> torch.Tensor:
        batch = dict(
            state_indices=index,
            has_initial_state=torch.tensor([False]),
            query_start_loc=torch.tensor([0, count]),
        )
        mixed, out = rows[:count].clone(), torch.empty(count, nv, dv, dtype=F64)
        kernels.causal_conv1d(
            rows[:count],
            case["conv_weight"],
            case["conv_bias"],
            case["conv_state"],
            **batch,
            out=mixed,
        )
        kernels.gdn_prefill(
            GdnPrefill(
                mixed,
                gates[0, :count],
                gates[1, :count],
                case["A_log"],
                case["dt_bias"],
                case["ssm_state"],
                **batch,
                chunk_indices=index,
                chunk_offsets=index,
                out=out,
            )
        )
        return out

    whole = prefill(9)
    states = case["ssm_state"][index].clone(), case["conv_state"][index].clone()
    prefill(8)
    case |= dict(qkv=rows[8:], a=gates[0, 8:], b=gates[1, 8:])
    kernels.gdn_decode(GdnDecode(**case))
    assert error_ratio(case["out"], whole[8:]) < 1e-13
    assert error_ratio(case["ssm_state"][index], states[0]) < 1e-13
    assert torch.equal(case["conv_state"][index], states[1])


def test_padding_and_empty_sequences_touch_no_state():
    case = gdn_case([3, 0, 2], [True, True, False], (1, 2, 8, 8), F64, "cpu", padding=2)
    empty = case["state_indices"][1]
    before = case["ssm_state"][empty].clone()
    kernels.gdn_prefill(GdnPrefill(**case))
    assert torch.equal(case["ssm_state"][empty], before)
    assert not case["out"][:5].isnan().any()
    assert case["out"][5:].isnan().all()


@pytest.mark.parametrize("split", [1, 40, 64, 65])
def test_layer_maths_equals_transformers(split):
    """conv, gates, delta rule and gated norm, prefilled in two parts, against the HF layer."""
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=48, num_hidden_layers=1, layer_types=["linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=24,
    )  # fmt: skip
    layer = Qwen3_5GatedDeltaNet(config, 0).float().eval()
    with torch.no_grad():
        layer.A_log.uniform_(-3, -1)
        layer.dt_bias.uniform_(-3, -1)
        layer.norm.weight.uniform_(0.5, 1.5)
        x = torch.randn(1, 100, 48)
        ref = layer(x)[0]
        qkv, z = layer.in_proj_qkv(x)[0] * 1.0, layer.in_proj_z(x)[0]
        a, b = layer.in_proj_a(x)[0], layer.in_proj_b(x)[0]
        outs = []
        conv = torch.full((2, 3, qkv.shape[1]), float("nan"))
        ssm = torch.full((2, 4, 24, 16), float("nan"))
        for start, end in ((0, split), (split, 100)):
            batch = dict(
                state_indices=torch.tensor([1], dtype=torch.int32),
                has_initial_state=torch.tensor([start > 0]),
                query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            )
            mixed, out = torch.empty(end - start, qkv.shape[1]), torch.empty(end - start, 4, 24)
            kernels.causal_conv1d(
                qkv[start:end], layer.conv1d.weight.squeeze(1), None, conv, **batch, out=mixed
            )
            kernels.gdn_prefill(GdnPrefill(
                mixed, a[start:end], b[start:end], layer.A_log, layer.dt_bias, ssm, **batch,
                chunk_indices=None, chunk_offsets=None, out=out,
            ))  # fmt: skip
            outs.append(out)
        normed = kernels.gated_rms_norm(
            torch.cat(outs), z.unflatten(-1, (4, 24)), layer.norm.weight, config.rms_norm_eps
        )
        assert error_ratio(layer.out_proj(normed), ref.double()) < 2e-6
