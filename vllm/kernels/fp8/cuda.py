# SPDX-License-Identifier: Apache-2.0
"""Products with float8 weights on NVIDIA GPUs: cuBLAS where it takes the shape, else Triton."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from vllm.kernels.fp8 import GROUP, Fp8Rows
from vllm.kernels.fp8.matmul import matmul
from vllm.kernels.fp8.quantize import quantize_groups, quantize_rows
from vllm.kernels.fp8.skinny import skinny_matmul, vector_matmul

#: rows up to which weights are streamed past the tokens: cuBLAS takes twice as long (H200)
_SKINNY_ROWS = 64


def linear_fp8(
    x: Tensor | Fp8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    input_scale: Tensor | None = None,
) -> Tensor:
    if isinstance(x, Tensor):
        x = Fp8Rows(*quantize_rows(x, input_scale), x.dtype)
    tokens, (n, k) = len(x.values), weight.shape
    # cuBLAS scales by rows into bfloat16 only.
    if x.dtype is torch.bfloat16 and n % 16 == 0 and k % 16 == 0 and tokens > _SKINNY_ROWS:
        product = scaled_mm(
            x.values,
            weight.t(),
            x.scale,
            ScalingType.RowWise,
            weight_scale[None],
            ScalingType.RowWise,
            output_dtype=x.dtype,
            use_fast_accum=True,
        )
        return product if bias is None else product + bias
    out = torch.empty(tokens, n, dtype=x.dtype, device=weight.device)
    if tokens == 1:
        vector_matmul(x.values, x.scale, weight, weight_scale, bias, out)
    else:
        _by_triton(x.values, x.scale, weight, weight_scale, bias, out)
    return out


def linear_fp8_block(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    block_scale: Tensor | None = None,
) -> Tensor:
    tokens, (n, k) = len(x), weight.shape
    values, scale = quantize_groups(x)
    if (
        block_scale is not None
        and _scales_blocks(x.device)
        and k % (4 * GROUP) == 0  # cuBLAS reads the scales of 4 blocks along k at a time
        and x.dtype is torch.bfloat16
        and tokens > _SKINNY_ROWS
    ):
        product = scaled_mm(
            values,
            weight.t(),
            scale,
            ScalingType.BlockWise1x128,
            block_scale.t(),
            ScalingType.BlockWise128x128,
            output_dtype=x.dtype,
        )[:tokens]
        return product if bias is None else product + bias
    out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    _by_triton(values, scale, weight, weight_scale, bias, out)
    return out


@cache
def _scales_blocks(device: torch.device) -> bool:
    """Whether cuBLAS takes these block scales: on Hopper alone."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def _by_triton(
    values: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Fill `out [tokens, n]` from the first `tokens` rows of `values`."""
    if len(out) <= _SKINNY_ROWS:
        skinny_matmul(values, scale, weight, weight_scale, bias, out)
    else:
        matmul(values, scale, weight, weight_scale, bias, out)
