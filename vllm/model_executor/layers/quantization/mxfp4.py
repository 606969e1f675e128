# SPDX-License-Identifier: Apache-2.0
"""MXFP4 (OCP Microscaling Formats 1.0): runs of 32 four-bit numbers under one power of two.

A number is sign, two bits of exponent and one of mantissa (e2m1); a scale is a biased exponent of 8
bits (e8m0). Both fit into bfloat16 and fp32 without loss.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vllm import decisions
from vllm.model_executor.models.weights import WeightsError
from vllm.model_executor.parameter import WeightDtypeError, WeightShapeError

METHOD = "mxfp4"
#: numbers under one scale
RUN = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`blocks [..., runs, 16]` uint8, the first of two numbers in the low bits, and `scales [...,
    runs]` uint8 `-> [..., 32 * runs]`.

    Raises WeightDtypeError and WeightShapeError.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise WeightDtypeError(f"mxfp4 is stored as uint8, not {blocks.dtype} and {scales.dtype}")
    expected = (*scales.shape, RUN // 2)
    if tuple(blocks.shape) != expected:
        raise WeightShapeError(expected, blocks.shape)
    values = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], device=blocks.device)
    numbers = values[torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()]
    exponents = scales.int() - _EXPONENT_BIAS
    return torch.ldexp(numbers, exponents[..., None]).flatten(-2).to(dtype)


def record_dequantised(dtype: torch.dtype) -> None:
    """That experts are made `dtype` while they load."""
    decisions.record(
        f"{METHOD} experts",
        f"made {str(dtype).removeprefix('torch.')} while they load",
        f"no kernel multiplies {METHOD} weights",
        f"keeping {METHOD}, a quarter of the memory",
    )


_EXPERTS, _SCALE = ".experts.", "_scale_inv"


def without_packing(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors, experts' `[..., columns / 2]` int8 made `dtype [..., columns]` by
    their scales `[..., columns / 32]` e8m0, which are called like them with `_scale_inv` behind
    (DeepSeek-V4). Other experts' tensors pass.

    Raises WeightsError for packed experts whose scales are missing or have another shape.
    """
    packed: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    passed: set[str] = set()
    for name, tensor in weights:
        weight = name.removesuffix(_SCALE)
        if _EXPERTS not in name or weight in passed:
            yield name, tensor
        elif name == weight and tensor.dtype != torch.int8:
            passed.add(weight)
            yield name, tensor
            if weight in scales:
                yield weight + _SCALE, scales.pop(weight)
        else:
            (packed if name == weight else scales)[weight] = tensor
            if weight in packed and weight in scales:
                record_dequantised(dtype)
                yield weight, _unpacked(weight, packed.pop(weight), scales.pop(weight), dtype)
    if packed:
        raise WeightsError([f"missing: {weight}{_SCALE}" for weight in packed])
    yield from ((weight + _SCALE, scale) for weight, scale in scales.items())


def _unpacked(name: str, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Raises WeightsError; a scale's bits are its exponent, so it is never converted."""
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // RUN)
    if packed.shape[-1] * 2 % RUN or scale.shape != expected or scale.dtype.itemsize != 1:
        raise WeightsError(
            [
                f"mis-shaped: {name}{_SCALE}: expected one byte for each {RUN} columns, "
                f"{list(expected)}, found {scale.dtype} {list(scale.shape)}"
            ]
        )
    blocks = packed.view(torch.uint8).unflatten(-1, (-1, RUN // 2))
    return dequantised(blocks, scale.view(torch.uint8), dtype)
