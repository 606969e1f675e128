# SPDX-License-Identifier: Apache-2.0
"""Weights in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.model_executor.layers.quantization.base import Layer, LinearMethod
from vllm.model_executor.parameter import WeightLayout, empty_parameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform


class UnquantizedLinearMethod(LinearMethod):
    """`weight [out, in]` as in the checkpoint."""

    def create_weights(
        self, layer: Layer, layout: WeightLayout, params_dtype: torch.dtype | None
    ) -> None:
        weight = empty_parameter(*layout.shape, dtype=params_dtype)
        set_weight_attrs(weight, {"weight_loader": layout.loader()})
        layer.register_parameter("weight", weight)

    def apply(self, layer: Layer, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        return current_platform.kernels.linear(x, layer.weight, bias)

    def apply_after_norm(
        self, layer: Layer, stream: ResidualStream, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return current_platform.kernels.norm_linear(stream, norm, layer.weight, bias)

    def apply_and_add(
        self, layer: Layer, x: Tensor | Fp8Rows, bias: Tensor | None, residual: Tensor
    ) -> ResidualStream:
        assert isinstance(x, Tensor)
        return current_platform.kernels.linear_add(x, layer.weight, bias, residual)
