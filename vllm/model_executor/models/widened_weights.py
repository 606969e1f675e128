# SPDX-License-Identifier: Apache-2.0
"""Float8 matrices of a checkpoint that a model keeps in its own dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from vllm import decisions
from vllm.kernels.fp8 import FP8, GROUP
from vllm.model_executor.parameter import WeightShapeError

_WEIGHT = "weight"
_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALE = "input_scale"


def widened(
    weights: Iterable[tuple[str, Tensor]], modules: Collection[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors, the float8 ones of layers called `modules` times their scales.

    Those are kept until their partners come; what stays alone passes as it is, to be reported.
    Scales of such layers' activations are left out. Raises WeightShapeError.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, _, kind = name.rpartition(".")
        meant = layer.rpartition(".")[2] in modules
        if not meant or kind not in (_WEIGHT, *_SCALES, _INPUT_SCALE):
            yield name, tensor
        elif kind == _WEIGHT and tensor.dtype is not FP8:
            yield name, tensor
        elif kind != _INPUT_SCALE:
            parts = waiting.setdefault(layer, {})
            parts[kind] = tensor
            if _WEIGHT in parts and len(parts) > 1:
                scale = next(parts[each] for each in _SCALES if each in parts)
                yield f"{layer}.{_WEIGHT}", _times(parts[_WEIGHT], scale).to(dtype)
                del waiting[layer]
                decisions.record(
                    f"float8 weights of {layer.rpartition('.')[2]}",
                    f"made {str(dtype).removeprefix('torch.')} while they load",
                    "its parts are multiplied one by one",
                    "keeping float8",
                )
    for layer, parts in waiting.items():
        yield from ((f"{layer}.{kind}", tensor) for kind, tensor in parts.items())


def _times(values: Tensor, scale: Tensor) -> Tensor:
    """`values [rows, columns]` by one scale, one per row, or one per block of 128 x 128; fp32."""
    rows, columns = values.shape
    blocks = (-(-rows // GROUP), -(-columns // GROUP))
    if scale.numel() in (1, rows):
        return values.float() * scale.float().reshape(-1, 1)
    if tuple(scale.shape) != blocks:
        raise WeightShapeError(blocks, scale.shape)
    wide = scale.float().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return values.float() * wide[:rows, :columns]
