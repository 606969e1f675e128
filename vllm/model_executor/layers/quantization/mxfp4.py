# SPDX-License-Identifier: Apache-2.0
"""MXFP4 (OCP Microscaling Formats 1.0): runs of 32 four-bit numbers under one power of two.

A number is sign, two bits of exponent and one of mantissa (e2m1); a scale is a biased exponent of 8
bits (e8m0). Both fit into bfloat16 and fp32 without loss.
"""

import torch
from torch import Tensor

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
