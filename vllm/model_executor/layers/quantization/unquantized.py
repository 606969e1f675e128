# SPDX-License-Identifier: Apache-2.0
"""Weights in the model's dtype."""

from functools import partial

import torch
from torch import Tensor

from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.model_executor.layers.quantization.base import ExpertsMethod, Layer, LinearMethod
from vllm.model_executor.parameter import (
    ExpertStack,
    ShardId,
    WeightLayout,
    empty_parameter,
    load_sections,
)
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

    def apply_from(self, first: int, layer: Layer, x: Tensor, bias: Tensor | None) -> Tensor:
        part = None if bias is None else bias[first:]
        return current_platform.kernels.linear(x, layer.weight[first:], part)

    def apply_after_norm(
        self, layer: Layer, stream: ResidualStream, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return current_platform.kernels.norm_linear(stream, norm, layer.weight, bias)

    def apply_and_add(
        self, layer: Layer, x: Tensor | Fp8Rows, bias: Tensor | None, residual: Tensor
    ) -> ResidualStream:
        assert isinstance(x, Tensor)
        return current_platform.kernels.linear_add(x, layer.weight, bias, residual)


class UnquantizedExpertsMethod(ExpertsMethod):
    """In the model's dtype, as in the checkpoint."""

    def create_weights(
        self, layer: Layer, name: str, layout: WeightLayout, stack: ExpertStack
    ) -> None:
        weight = empty_parameter(stack.size, *layout.shape)
        load = partial(_load_16_bit, stack=stack, layout=layout)
        set_weight_attrs(weight, {"weight_loader": load, "stacked": stack.names})
        layer.register_parameter(name, weight)

    def scales(self, layer: Layer) -> None:
        return None


def _load_16_bit(
    param: Tensor,
    loaded: Tensor,
    shard_id: tuple[ShardId, ShardId | tuple[ShardId, ...] | None] | None = None,
    *,
    stack: ExpertStack,
    layout: WeightLayout,
) -> None:
    """Copy this rank's part of all routed experts, or of some sections of one expert.

    Raises WeightShapeError.
    """
    sections, dim = layout.split
    if shard_id is None:
        whole = stack.part(loaded)
        load_sections(param[: stack.count], whole, sections=sections, dim=dim + 1)
        return
    expert, section = shard_id
    if (place := stack.place(expert)) is not None:
        load_sections(param[place], loaded, section, sections=sections, dim=dim)
