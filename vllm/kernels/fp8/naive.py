# SPDX-License-Identifier: Apache-2.0
"""Products with float8 weights in plain torch: what every platform computes."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.kernels.fp8 import GROUP, Fp8Rows, as_rows, quantize_groups

#: `x [m, k] fp32 @ weight [n, k].T e4m3 -> [m, n]` fp32
Product = Callable[[Tensor, Tensor], Tensor]


def _widened_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight.float())


def linear_fp8(
    x: Tensor | Fp8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    input_scale: Tensor | None = None,
) -> Tensor:
    """`linear` with a float8 weight, activations made float8 on the way.

    `x [tokens, k]`, `weight [n, k]` e4m3, `weight_scale [n]` fp32 -> `[tokens, n]` in the dtype
    of `x`. Each token is scaled by its own largest value, or all by `input_scale [1]`
    (`x / input_scale` is what is rounded). Arithmetic: `vllm.kernels.fp8`. Tokens that another
    op has made float8 are taken as they are.
    """
    return linear_rows(x, weight, weight_scale, bias, input_scale, _widened_product)


def linear_fp8_block(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    block_scale: Tensor | None = None,
) -> Tensor:
    """`linear_fp8` with scales per token and 128 channels, and per weight row and 128 channels.

    `weight_scale [ceil(k / 128), n]` fp32; `block_scale [n / 128, k / 128]`: the same where
    each 128 rows share one, for libraries.
    """
    return linear_groups(x, weight, weight_scale, bias, _widened_product)


def linear_rows(
    x: Tensor | Fp8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    product: Product,
) -> Tensor:
    """`linear_fp8` by way of a product of whole matrices."""
    rows = as_rows(x, input_scale)
    out = product(rows.values.float(), weight) * (rows.scale * weight_scale)
    return _finish(out, bias, rows.dtype)


def linear_groups(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, product: Product
) -> Tensor:
    """`linear_fp8_block` by way of a product of each 128 channels."""
    values, scale = quantize_groups(x)
    out = x.new_zeros(len(x), len(weight), dtype=torch.float32)
    for group, start in enumerate(range(0, x.shape[1], GROUP)):
        part = slice(start, start + GROUP)
        scales = scale[:, group : group + 1] * weight_scale[group]
        out += product(values[:, part].float(), weight[:, part]) * scales
    return _finish(out, bias, x.dtype)


def _finish(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (out if bias is None else out + bias).to(dtype)
