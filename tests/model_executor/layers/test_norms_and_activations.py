# SPDX-License-Identifier: Apache-2.0
"""The thin modules around the norm and activation kernels."""

import pytest
import torch
from torch import Tensor, nn

from vllm.model_executor.layers.activation import SiluAndMul, get_act_and_mul_fn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated

EPS = 1e-5


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize(("cls", "offset"), [(RMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_norm_and_fused_add(cls: type[RMSNorm], offset: float) -> None:
    layer = cls(8, EPS)
    layer.weight.weight_loader(layer.weight, torch.linspace(-1, 1, 8))
    scale = torch.linspace(-1, 1, 8) + offset
    x, residual = torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(layer(x), norm(x) * scale)
    normed, stream = layer(x, residual)
    assert torch.equal(stream, x + residual)
    torch.testing.assert_close(normed, norm(x + residual) * scale)


def test_gated_norm() -> None:
    layer = RMSNormGated(8, EPS)
    layer.weight.weight_loader(layer.weight, torch.linspace(-1, 1, 8))
    x, gate = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    expected = norm(x) * torch.linspace(-1, 1, 8) * nn.functional.silu(gate)
    torch.testing.assert_close(layer(x, gate), expected.flatten(1))


def test_gated_activation() -> None:
    x = torch.randn(4, 10)
    expected = nn.functional.silu(x[:, :5]) * x[:, 5:]
    torch.testing.assert_close(get_act_and_mul_fn("silu")(x), expected)
    assert isinstance(get_act_and_mul_fn("silu"), SiluAndMul)
    expected = nn.functional.gelu(x[:, :5], approximate="tanh") * x[:, 5:]
    torch.testing.assert_close(get_act_and_mul_fn("gelu_pytorch_tanh")(x), expected)
    with pytest.raises(ValueError, match="hidden_act 'gelu' is not supported; supported: 'silu', "):
        get_act_and_mul_fn("gelu")
