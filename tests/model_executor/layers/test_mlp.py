# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward network: what it computes, and that its activation is fused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.quantization.base import LinearMethod
from vllm.platforms import current_platform


class CountingKernels(NaiveKernels):
    """The reference; counts how gate and up are computed."""

    fused = 0

    def linear_silu_and_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.fused += 1
        return super().linear_silu_and_mul(x, weight, bias)


class DoublingMethod(LinearMethod):
    """A foreign way of multiplying, which the fused op knows nothing of."""

    def create_weights(self, layer: nn.Module, layout: object, params_dtype: object) -> None:
        raise NotImplementedError

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * nn.functional.linear(x, layer.weight, bias)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CountingKernels:
    counting = CountingKernels()
    monkeypatch.setitem(vars(current_platform), "kernels", counting)
    return counting


class RowsMethod(DoublingMethod):
    """Takes float8 activations; notes whether it got them."""

    takes_fp8_rows = True

    def __init__(self) -> None:
        self.got: list[bool] = []

    def apply(self, layer: nn.Module, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor:
        self.got.append(isinstance(x, Fp8Rows))
        wide = x.values.float() * x.scale if isinstance(x, Fp8Rows) else x
        return nn.functional.linear(wide, layer.weight, bias)


def make_mlp(bias: bool) -> GatedMLP:
    torch.manual_seed(0)
    mlp = GatedMLP(16, 24, bias=bias)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter)
    return mlp


def expected(mlp: GatedMLP, x: Tensor, factor: float = 1.0) -> Tensor:
    gate_up = factor * nn.functional.linear(x, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias)
    hidden = nn.functional.silu(gate_up[:, :24]) * gate_up[:, 24:]
    return nn.functional.linear(hidden, mlp.down_proj.weight, mlp.down_proj.bias)


@pytest.mark.parametrize("bias", [False, True])
def test_the_activation_is_part_of_the_matmul(kernels: CountingKernels, bias: bool) -> None:
    mlp, x = make_mlp(bias), torch.randn(5, 16)
    torch.testing.assert_close(mlp(x), expected(mlp, x))
    assert kernels.fused == 1


def test_another_linear_method_keeps_its_own_product(kernels: CountingKernels) -> None:
    mlp, x = make_mlp(bias=True), torch.randn(5, 16)
    mlp.gate_up_proj.quant_method = DoublingMethod()
    torch.testing.assert_close(mlp(x), expected(mlp, x, 2.0))
    assert kernels.fused == 0


def test_a_branch_that_is_yet_to_be_added_is_made_float8_with_the_norm() -> None:
    mlp, norm = make_mlp(bias=False), RMSNorm(16)
    nn.init.ones_(norm.weight)
    mlp.gate_up_proj.quant_method = method = RowsMethod()
    x, branch = torch.randn(5, 16), torch.randn(5, 16)
    stream, total = mlp.after_norm(norm, ResidualStream(x, branch))
    assert method.got == [True] and torch.equal(total, x + branch)
    rows, _ = norm.add_and_normalise_fp8(branch, x)
    assert stream.residual is total and torch.equal(stream.added_branch, mlp(rows))
    assert method.got == [True, True]
    mlp.after_norm(norm, ResidualStream(x))
    assert method.got[2:] == [False]
