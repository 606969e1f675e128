# SPDX-License-Identifier: Apache-2.0
"""Float8 experts: a mixture's matrices stacked, with their scales."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from vllm.kernels import fp8
from vllm.kernels.moe import ExpertScales
from vllm.model_executor.layers.quantization.base import ExpertsMethod, Layer
from vllm.model_executor.layers.quantization.fp8_block import block_scale_shape, load_block_scales
from vllm.model_executor.layers.quantization.fp8_rows import (
    AnyShard,
    fp8_loader,
    load_quantizing,
    load_row_scales,
)
from vllm.model_executor.parameter import (
    ExpertStack,
    ShardId,
    WeightLayout,
    empty_parameter,
)
from vllm.model_executor.utils import set_weight_attrs

#: `(place in the stack, the stored tensor, its section of the matrix)`
MatrixLoader = Callable[[int, Tensor, AnyShard], None]


class Fp8ExpertsMethod(ExpertsMethod):
    """e4m3 with fp32 scales, as linear layers have them (`Fp8RowsMethod`, `Fp8BlockMethod`).

    By rows `NAME_scale [experts, rows]`, by blocks `NAME_scale_inv [experts, ceil(columns / 128),
    rows]`. `from_16_bit`: the checkpoint is not quantised. Activations are scaled per token;
    `drops_input_scales`: the checkpoint's scales of them are left out. Raises ValueError where a
    shard along the input is not whole blocks.
    """

    def __init__(
        self,
        weights: Literal["rows", "block"],
        *,
        from_16_bit: bool = False,
        drops_input_scales: bool = False,
    ) -> None:
        self._blocks = weights == "block"
        self._from_16_bit = from_16_bit
        self._drops_input_scales = drops_input_scales

    def create_weights(
        self, layer: Layer, name: str, layout: WeightLayout, stack: ExpertStack
    ) -> None:
        shape = block_scale_shape(layout) if self._blocks else layout.shape[:1]
        weight = empty_parameter(stack.size, *layout.shape, dtype=fp8.FP8)
        scale = empty_parameter(stack.size, *shape, dtype=torch.float32)

        def load_weight(place: int, loaded: Tensor, shard_id: AnyShard) -> None:
            if self._from_16_bit:
                load_quantizing(weight[place], loaded, shard_id, scale=scale[place], layout=layout)
            else:
                fp8_loader(layout.loader())(weight[place], loaded, shard_id)

        def load_scale(place: int, loaded: Tensor, shard_id: AnyShard) -> None:
            if self._blocks:
                load_block_scales(scale[place], loaded, shard_id, layout=layout)
            else:
                load_row_scales(scale[place], loaded, shard_id, rows=layout.rows)

        unit_gain = (3 / layout.columns.size) ** 0.5 / fp8.FP8_MAX
        ranges = ((-fp8.FP8_MAX, fp8.FP8_MAX), (unit_gain, unit_gain))
        loaders = (load_weight, load_scale)
        for param, load, dummy_range in zip((weight, scale), loaders, ranges, strict=True):
            loader = partial(_load_stack, stack=stack, load=load)
            attrs = {"weight_loader": loader, "stacked": stack.names, "dummy_range": dummy_range}
            set_weight_attrs(param, attrs)
        set_weight_attrs(weight, {"drops_input_scales": self._drops_input_scales})
        if self._from_16_bit:
            set_weight_attrs(scale, {"optional": True})
        layer.register_parameter(name, weight)
        layer.register_parameter(f"{name}_scale_inv" if self._blocks else f"{name}_scale", scale)

    def scales(self, layer: Layer) -> ExpertScales:
        if self._blocks:
            return ExpertScales(layer.gate_up_proj_scale_inv, layer.down_proj_scale_inv)
        return ExpertScales(layer.gate_up_proj_scale, layer.down_proj_scale)


def _load_stack(
    param: Tensor,
    loaded: Tensor,
    shard_id: tuple[ShardId, AnyShard] | None = None,
    *,
    stack: ExpertStack,
    load: MatrixLoader,
) -> None:
    """`load` one expert's tensor, or one by one those of all routed experts.

    Raises WeightShapeError.
    """
    if shard_id is not None:
        expert, section = shard_id
        if (place := stack.place(expert)) is not None:
            load(place, loaded, section)
        return
    for place, matrix in enumerate(stack.part(loaded)):
        load(place, matrix, None)
