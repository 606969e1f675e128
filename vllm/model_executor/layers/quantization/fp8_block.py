# SPDX-License-Identifier: Apache-2.0
"""Float8 weights with one scale per 128 x 128 block (DeepSeek-V3, arXiv 2412.19437, 3.3)."""

from functools import partial

import torch
from torch import Tensor

from vllm.exceptions import VLLMValidationError
from vllm.kernels import fp8
from vllm.kernels.fp8 import GROUP, Fp8Rows
from vllm.model_executor.layers.quantization.base import Layer, LinearMethod
from vllm.model_executor.layers.quantization.fp8_rows import AnyShard, fp8_loader
from vllm.model_executor.parameter import (
    WeightLayout,
    WeightShapeError,
    empty_parameter,
    load_sections,
    wanted_sections,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform


def _blocks(size: int) -> int:
    return -(-size // GROUP)


class Fp8BlockMethod(LinearMethod):
    """`weight [out, in]` e4m3 and `weight_scale_inv [ceil(in / 128), out]` fp32.

    Scales are kept per output row: matrices fused into one weight, and the shards of each, need
    not start on a block boundary. Where all of them do, `block_scale [out / 128, in / 128]` holds
    them once more in the form that libraries take. Along the input a shard must be whole blocks:
    ValueError.
    """

    def create_weights(
        self, layer: Layer, layout: WeightLayout, params_dtype: torch.dtype | None
    ) -> None:
        rows, columns = layout.shape
        weight = empty_parameter(rows, columns, dtype=fp8.FP8)
        scale = empty_parameter(*block_scale_shape(layout), dtype=torch.float32)
        unit_gain = (3 / layout.columns.size) ** 0.5 / fp8.FP8_MAX
        loader = partial(load_block_scales, layout=layout)
        set_weight_attrs(scale, {"weight_loader": loader, "dummy_range": (unit_gain, unit_gain)})
        dummy_range = (-fp8.FP8_MAX, fp8.FP8_MAX)
        attrs = {"weight_loader": fp8_loader(layout.loader()), "dummy_range": dummy_range}
        set_weight_attrs(weight, attrs)
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale_inv", scale)
        aligned = columns % GROUP == 0 and all(s.local_size % GROUP == 0 for s in layout.rows)
        blocks = torch.empty(rows // GROUP, columns // GROUP, dtype=torch.float32)
        layer.register_buffer("block_scale", blocks if aligned else None)

    def process_weights_after_loading(self, layer: Layer) -> None:
        if layer.block_scale is not None:
            layer.block_scale.copy_(layer.weight_scale_inv[:, ::GROUP].t())

    def apply(self, layer: Layer, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        return current_platform.kernels.linear_fp8_block(
            x, layer.weight, layer.weight_scale_inv, bias, block_scale=layer.block_scale
        )


def block_scale_shape(layout: WeightLayout) -> tuple[int, int]:
    """Of `weight_scale_inv`; ValueError where a shard along the input is not whole blocks."""
    rows, columns = layout.shape
    if layout.columns.parts > 1 and columns % GROUP:
        raise VLLMValidationError(
            f"tensor parallelism over {layout.columns.parts} ranks cuts the {GROUP}-wide scale "
            f"blocks of an input of {layout.columns.size}; choose a size that leaves each "
            f"rank a multiple of {GROUP}"
        )
    return _blocks(columns), rows


def load_block_scales(
    param: Tensor, loaded: Tensor, shard_id: AnyShard = None, *, layout: WeightLayout
) -> None:
    """`loaded [ceil(rows / 128), ceil(in / 128)]`, blocks counted from the stored tensor's start.

    Raises WeightShapeError.
    """
    stored_rows = sum(section.size for section in wanted_sections(shard_id, layout.rows))
    expected = (_blocks(stored_rows), _blocks(layout.columns.size))
    if tuple(loaded.shape) != expected:
        raise WeightShapeError(expected, loaded.shape)
    blocks = param.shape[0]
    part = loaded.narrow(1, layout.columns.part * blocks, blocks).to(torch.float32)
    per_row = part.t().repeat_interleave(GROUP, dim=1)[:, :stored_rows]
    load_sections(param, per_row, shard_id, sections=layout.rows, dim=1)
