# SPDX-License-Identifier: Apache-2.0
"""Float8 weights with one scale per output row.

A checkpoint with one scale per matrix fills the rows of that matrix with it: matrices of different
scales share a fused weight, and nothing is requantised. 16-bit checkpoints are quantised while
they load, shard by shard, so the 16-bit weights are never in device memory as a whole.
"""

from functools import partial

import torch
from torch import Tensor

from vllm.kernels import fp8
from vllm.model_executor.host_weights import is_on_host
from vllm.model_executor.layers.quantization.base import Layer, LinearMethod
from vllm.model_executor.parameter import (
    Section,
    ShardId,
    WeightDtypeError,
    WeightLayout,
    WeightLoader,
    WeightShapeError,
    empty_parameter,
    load_sections,
    local_parts,
    wanted_sections,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

AnyShard = ShardId | tuple[ShardId, ...] | None


class Fp8RowsMethod(LinearMethod):
    """`weight [out, in]` e4m3, `weight_scale [out]` fp32, `input_scale [sections]` fp32 if static.

    `static`: the checkpoint fixes the activation scale, one per matrix; a fused layer uses the
    largest, so that none saturates. `from_16_bit`: the checkpoint is not quantised.
    """

    def __init__(self, *, static: bool = False, from_16_bit: bool = False) -> None:
        self.static = static
        self.from_16_bit = from_16_bit

    @property
    def takes_fp8_rows(self) -> bool:
        return not self.static

    def create_weights(
        self, layer: Layer, layout: WeightLayout, params_dtype: torch.dtype | None
    ) -> None:
        rows, columns = layout.shape
        weight = empty_parameter(rows, columns, dtype=fp8.FP8)
        scale = empty_parameter(rows, dtype=torch.float32)
        unit_gain = (3 / layout.columns.size) ** 0.5 / fp8.FP8_MAX
        set_weight_attrs(scale, {"dummy_range": (unit_gain, unit_gain)})
        if self.from_16_bit:
            loader: WeightLoader = partial(load_quantizing, scale=scale, layout=layout)
            set_weight_attrs(scale, {"optional": True})
        else:
            loader = fp8_loader(layout.loader())
            scale_loader = partial(load_row_scales, rows=layout.rows)
            set_weight_attrs(scale, {"weight_loader": scale_loader})
        dummy_range = (-fp8.FP8_MAX, fp8.FP8_MAX)
        set_weight_attrs(weight, {"weight_loader": loader, "dummy_range": dummy_range})
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scale)
        layer.register_buffer("static_scale", None)
        if self.static:
            self._create_input_scale(layer, layout.rows)

    def _create_input_scale(self, layer: Layer, rows: tuple[Section, ...]) -> None:
        scale = empty_parameter(len(rows), dtype=torch.float32)
        loader = partial(_load_input_scales, rows=rows)
        set_weight_attrs(scale, {"weight_loader": loader, "dummy_range": (0.01, 0.01)})
        layer.register_parameter("input_scale", scale)
        layer.register_buffer("static_scale", torch.empty(1, dtype=torch.float32))

    def process_weights_after_loading(self, layer: Layer) -> None:
        if self.static:
            layer.static_scale.copy_(layer.input_scale.max())

    def apply(self, layer: Layer, x: Tensor | fp8.Fp8Rows, bias: Tensor | None) -> Tensor:
        return current_platform.kernels.linear_fp8(
            x, layer.weight, layer.weight_scale, bias, input_scale=layer.static_scale
        )


def fp8_loader(loader: WeightLoader) -> WeightLoader:
    """`loader`, refusing what is not stored as e4m3: a copy would round it without a scale."""

    def load(param: Tensor, loaded: Tensor, shard_id: AnyShard = None) -> None:
        if loaded.dtype is not fp8.FP8:
            raise WeightDtypeError(f"expected float8_e4m3fn, found {loaded.dtype}")
        loader(param, loaded, shard_id)

    return load


def load_quantizing(
    param: Tensor, loaded: Tensor, shard_id: AnyShard = None, *, scale: Tensor, layout: WeightLayout
) -> None:
    """Quantise this process's part of 16-bit rows, on the parameter's device, or where they are if
    it waits in host memory."""
    if loaded.dtype.itemsize < 2:
        raise WeightDtypeError(f"expected a 16-bit or wider weight to quantise, got {loaded.dtype}")
    sections, dim = layout.split
    for start, part in local_parts(param.shape, loaded, shard_id, sections, dim):
        rows = slice(start, start + len(part)) if dim == 0 else slice(None)
        values, row_scale = fp8.quantize_rows(part if is_on_host(param) else part.to(param.device))
        param.data[rows].copy_(values)
        scale.data[rows].copy_(row_scale.squeeze(-1))


def load_row_scales(
    param: Tensor, loaded: Tensor, shard_id: AnyShard = None, *, rows: tuple[Section, ...]
) -> None:
    """One scale per matrix (one element) or per row (`[rows]` or `[rows, 1]`)."""
    flat = loaded.reshape(-1)
    if flat.numel() == 1:
        flat = flat.expand(sum(section.size for section in wanted_sections(shard_id, rows)))
    load_sections(param, flat, shard_id, sections=rows)


def _load_input_scales(
    param: Tensor, loaded: Tensor, shard_id: AnyShard = None, *, rows: tuple[Section, ...]
) -> None:
    if loaded.numel() != 1:
        raise WeightShapeError([1], loaded.shape)
    wanted = wanted_sections(shard_id, rows)
    for index, section in enumerate(rows):
        if section in wanted:
            param.data[index] = loaded.reshape(())
