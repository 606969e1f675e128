# SPDX-License-Identifier: Apache-2.0
"""Products with float8 weights on the CPU: `skinny_linear` widens weights on the way."""

from torch import Tensor

from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.fp8.naive import linear_groups, linear_rows
from vllm.kernels.linear.cpu import skinny_linear


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return skinny_linear(x, weight, None)


def linear_fp8(
    x: Tensor | Fp8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    input_scale: Tensor | None = None,
) -> Tensor:
    return linear_rows(x, weight, weight_scale, bias, input_scale, _product)


def linear_fp8_block(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    block_scale: Tensor | None = None,
) -> Tensor:
    return linear_groups(x, weight, weight_scale, bias, _product)
