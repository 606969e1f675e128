# SPDX-License-Identifier: Apache-2.0
"""The reference norms, gates and rotary embedding against their formulas."""

import pytest
import torch

from tests.kernels.cases import error_ratio, rope_case, strided
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.rotary import RotaryProblem
from vllm.kernels.rotary.naive import rotate

kernels = NaiveKernels()


def test_rms_norm_is_the_formula():
    x, w = torch.randn(5, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    ref = x / (x.pow(2).sum(-1, keepdim=True) / 24 + 1e-3).sqrt()
    assert error_ratio(kernels.rms_norm(x, w, 1e-3), ref * w) < 1e-14
    assert error_ratio(kernels.rms_norm(x, w, 1e-3, one_plus=True), ref * (1 + w)) < 1e-14


def test_rms_norm_roundings_follow_the_two_families():
    """Plain weights multiply the rounded value; `1 + w` multiplies before the only rounding."""
    x = torch.randn(64, 32).bfloat16()
    w = torch.randn(32).bfloat16()
    norm = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(kernels.rms_norm(x, w, 1e-6), norm.bfloat16() * w)
    once = (norm * (1 + w.float())).bfloat16()
    assert torch.equal(kernels.rms_norm(x, w, 1e-6, one_plus=True), once)


def test_fused_add_returns_the_rounded_sum():
    x, residual = torch.randn(2, 7, 16).half()
    w = torch.randn(16).half()
    y, total = kernels.fused_add_rms_norm(x, residual, w, 1e-6, one_plus=True)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, kernels.rms_norm(total, w, 1e-6, one_plus=True))


def test_gates_take_strided_views():
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    gate = strided(torch.randn(3, 2, 4, dtype=torch.float64))
    w = torch.rand(4, dtype=torch.float64)
    norm = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    ref = (norm * w * gate / (1 + (-gate).exp())).flatten(1)
    assert error_ratio(kernels.gated_rms_norm(x, gate, w, 1e-6), ref) < 1e-14
    ref = (x / (1 + (-gate).exp())).flatten(1)
    assert error_ratio(kernels.mul_sigmoid(x, gate), ref) < 1e-14
    both = torch.cat([gate.flatten(1), x.flatten(1)], dim=-1)
    ref = (gate / (1 + (-gate).exp()) * x).flatten(1)
    assert error_ratio(kernels.silu_and_mul(both), ref) < 1e-14


def test_relu_squared_is_zero_below_zero():
    x = torch.tensor([[-2.0, -0.0, 0.5, 3.0]])
    assert kernels.relu_squared(x).tolist() == [[0.0, 0.0, 0.25, 9.0]]


@pytest.mark.parametrize("rot", [4, 16])
def test_rotation_depends_on_relative_position_only(rot):
    """The defining property of RoPE: `<R_m q, R_n k>` is a function of `m - n`."""
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    angles = torch.arange(12)[:, None] * torch.rand(rot // 2, dtype=torch.float64)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    products = [
        (rotate(q, table[[m]]) * rotate(k, table[[n]])).sum() for m, n in [(3, 1), (9, 7), (3, 2)]
    ]
    assert torch.allclose(products[0], products[1], atol=1e-12)
    assert not torch.allclose(products[0], products[2], atol=1e-3)


def test_qk_norm_rope_cache_splits_gated_heads_and_skips_padding():
    case = rope_case(5, (4, 2, 8), torch.float32, "cpu", rot=8)
    q = kernels.qk_norm_rope_cache(RotaryProblem(**case))
    packed = case["qkv"][:, : 4 * 16].unflatten(1, (4, 2, 8))[:, :, 0]
    normed = kernels.rms_norm(packed, case["q_norm_weight"], 1e-6, one_plus=True)
    assert error_ratio(q, rotate(normed, case["cos_sin"][case["positions"]]).double()) < 1e-6
    value = case["qkv"][:, -16:].unflatten(1, (2, 8))
    written = case["kv_cache"][:, 1].flatten(0, 1)
    slots = case["slot_mapping"]
    assert torch.equal(written[slots[:-1]], value[:-1])
    assert written.isnan().all(-1).all(-1).sum() == len(written) - 4
